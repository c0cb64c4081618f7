#include "framework/training/output_watch.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "framework/training/loaded_weights.h"

namespace megashard {

class OutputWatch::Runner : public ForwardRunner {
 public:
  Runner(std::string path, std::shared_ptr<ForwardRunner> inner, std::shared_ptr<std::string> first)
      : path_(std::move(path)), inner_(std::move(inner)), first_(std::move(first)) {}

  std::vector<at::Tensor> run(const Body& body, const std::vector<at::Tensor>& inputs) override {
    auto outputs = inner_ == nullptr ? body(inputs) : inner_->run(body, inputs);
    const c10::NoGradGuard no_grad;
    for (const auto& output : outputs) {
      // Those inside a module have ended before it.
      if (first_->empty() && output.defined() && output.is_floating_point() && !is_finite(output)) *first_ = path_;
    }
    return outputs;
  }

 private:
  std::string path_;
  std::shared_ptr<ForwardRunner> inner_;
  std::shared_ptr<std::string> first_;
};

OutputWatch::OutputWatch(torch::nn::Module& model) {
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* module = dynamic_cast<HookedModule*>(item.value().get());
    if (module == nullptr) continue;
    watched_.push_back({module, module->forward_runner()});
    module->set_forward_runner(std::make_shared<Runner>(item.key(), module->forward_runner(), first_));
  }
}

OutputWatch::~OutputWatch() {
  for (auto& each : watched_) each.module->set_forward_runner(std::move(each.before));
}

std::string OutputWatch::take_first() { return std::exchange(*first_, ""); }

}  // namespace megashard
