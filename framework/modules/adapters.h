#pragma once

namespace megashard {

/// A module that may have adapters (LoRA) beside its own weights. Without them a model is the one that they began with,
/// as PEFT's disable_adapter: the reference of a preference loss.
class HasAdapters {
 public:
  virtual ~HasAdapters() = default;
  virtual bool has_adapters() const = 0;
  /// False: forward leaves them out.
  void use_adapters(bool used) { uses_adapters_ = used; }

 protected:
  bool uses_adapters() const { return uses_adapters_; }

 private:
  bool uses_adapters_ = true;
};

}  // namespace megashard
