#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace megashard {

/// Provides hooks for tensors that autograd saves for backward (torch.autograd.graph.saved_tensors_hooks, which
/// LibTorch has only in Python). Hooks must keep only a detach() of their tensor: the tensor itself would keep its
/// graph alive forever.
class SavedTensorProvider {
 public:
  virtual ~SavedTensorProvider() = default;
  /// Returns hooks for one tensor that is about to be saved on this thread; null: saved as usual. Not called for
  /// wrapped numbers.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// While it exists, `provider` handles tensors that this thread saves; the innermost guard is used. A guard without
/// provider saves as usual. Guards are destroyed in reverse order.
class SavedTensorHooks {
 public:
  explicit SavedTensorHooks(SavedTensorProvider* provider);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

 private:
  SavedTensorProvider* outer_;
};

/// Base class of hooks; compiled autograd has nothing to retrieve from them.
struct SavedTensorHook : torch::autograd::SavedVariableHooks {
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::nullopt;
  }
};

}  // namespace megashard
