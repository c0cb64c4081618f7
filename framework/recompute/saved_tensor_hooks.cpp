#include "framework/recompute/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

namespace megashard {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

thread_local SavedTensorProvider* innermost = nullptr;

/// LibTorch asks its engine for default hooks of saved tensors; the standard engine has none.
class HookingEngine final : public Engine {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost == nullptr ? nullptr : innermost->make_hooks();
  }

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph, bool create_graph,
                        bool accumulate_grad, const edge_list& outputs) override {
    // Device threads are started once per process, by the engine that runs the first backward. If another engine had
    // started them, ours would have no threads and crash at the first CUDA backward.
    initialize_device_threads_pool();
    TORCH_CHECK(thread_pool_shared_ != nullptr,
                "a backward ran before megashard's autograd engine was installed, so the autograd threads are not "
                "ours: link libmegashard into the program (or load it before the first backward)");
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
};

Engine& hooking_engine() {
  static auto* engine = new HookingEngine;  // not destroyed: its device threads outlive static destruction
  return *engine;
}

/// Keeps an existing other engine (Python's, in a process that imported torch).
const bool installed = [] {
  if (&Engine::get_default_engine() != &Engine::get_base_engine()) return false;
  torch::autograd::set_default_engine_stub(&hooking_engine);
  return true;
}();

}  // namespace

SavedTensorHooks::SavedTensorHooks(SavedTensorProvider* provider) : outer_(innermost) {
  TORCH_CHECK(installed, "another autograd engine is this process's default (is it a Python process?): recompute and "
                         "activation offload without Python need megashard's");
  innermost = provider;
}

SavedTensorHooks::~SavedTensorHooks() { innermost = outer_; }

}  // namespace megashard
