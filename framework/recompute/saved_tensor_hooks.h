#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace megashard {

/// Decides what becomes of the tensors that autograd saves for backward
/// (torch.autograd.graph.saved_tensors_hooks, for which LibTorch has only Python). Hooks must not
/// keep the tensor that they are given, only a detach() of it: the tensor itself would keep its
/// graph alive for ever.
class SavedTensorProvider {
 public:
  virtual ~SavedTensorProvider() = default;
  /// Hooks for one tensor, about to be saved on this thread; null: saved as usual. Not used for
  /// wrapped numbers.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// While one lives, `provider` is asked for what this thread saves; the innermost guard counts. A
/// guard without a provider saves as usual. Guards end in reverse order.
class SavedTensorHooks {
 public:
  explicit SavedTensorHooks(SavedTensorProvider* provider);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

 private:
  SavedTensorProvider* outer_;
};

/// Base of hooks: says that compiled autograd has nothing to retrieve from them.
struct SavedTensorHook : torch::autograd::SavedVariableHooks {
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::nullopt;
  }
};

}  // namespace megashard
