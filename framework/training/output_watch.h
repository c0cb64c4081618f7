#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// While it lives, looks at the outputs of a model's hooked modules, and finds the first that is not finite. The host
/// waits for the device at each, and layers that are computed together otherwise run one by one.
class OutputWatch {
 public:
  explicit OutputWatch(torch::nn::Module& model);
  ~OutputWatch();  ///< the modules run as before
  OutputWatch(const OutputWatch&) = delete;
  OutputWatch& operator=(const OutputWatch&) = delete;

  /// The path of that module, of the forwards since the last call: "model.layers.3.mlp"; empty: all are finite.
  std::string take_first();

 private:
  class Runner;
  struct Watched {
    HookedModule* module;
    std::shared_ptr<ForwardRunner> before;
  };
  std::shared_ptr<std::string> first_ = std::make_shared<std::string>();
  std::vector<Watched> watched_;
};

}  // namespace megashard
