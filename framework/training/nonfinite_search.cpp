#include "framework/training/nonfinite_search.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "framework/training/loaded_weights.h"
#include "parallel/collectives/agreement.h"
#include "parallel/guarded_tensor.h"

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

namespace {

/// Those whose gradient is not finite on some rank, the one that backward comes to first in front: what it passes on is
/// not finite either. Collective.
std::vector<std::string> gradients_not_finite(const torch::nn::Module& model, const ProcessGroupPtr& group) {
  const auto parameters = model.named_parameters();
  const auto of_ranks = gather_or_throw(group, [&] {
    std::string names;
    for (const auto& item : parameters) {
      const at::Tensor gradient = item.value().grad();
      if (gradient.defined() && !is_finite(unguarded(gradient))) names = item.key() + "\n" + names;
    }
    return names;
  });
  std::vector<std::string> all;
  for (const auto& names : of_ranks) {
    std::istringstream lines(names);
    for (std::string name; std::getline(lines, name);) {
      if (std::ranges::find(all, name) == all.end()) all.push_back(name);
    }
  }
  return all;
}

}  // namespace

std::string NonfiniteSearch::find_in_outputs(const std::vector<Batch>& batches, int64_t consumed) {
  OutputWatch watch(model_);
  std::string mine;
  for (size_t i = 0; i < batches.size(); i += step_.together()) {
    const double loss = step_.evaluate(step_.parts_from(batches, i))[0].item<double>();
    const auto module = watch.take_first();
    if (!mine.empty() || std::isfinite(loss)) continue;
    mine = data_.microbatch_text(i, batches.size(), consumed) +
           (module.empty() ? ", where each module's output is finite, but not the loss"
                           : ", where the first output that is not finite is that of " + module);
  }
  const auto of_ranks = gather_or_throw(world_, [&] { return mine; });
  const auto found = std::ranges::find_if(of_ranks, [](const std::string& of_rank) { return !of_rank.empty(); });
  if (found == of_ranks.end()) return "";
  return (world_->size() == 1 ? "" : c10::str("rank ", found - of_ranks.begin(), ", ")) + *found;
}

std::string NonfiniteSearch::find_in_gradients(const std::vector<Batch>& batches, int64_t consumed) {
  for (size_t i = 0; i < batches.size(); i += step_.together()) {
    step_.backward(step_.parts_from(batches, i));
    const auto names = gradients_not_finite(model_, world_);
    if (names.empty()) continue;
    const auto of_ranks = gather_or_throw(world_, [&] { return data_.microbatch_text(i, batches.size(), consumed); });
    constexpr std::ptrdiff_t kShown = 4;
    std::string where;
    for (std::ptrdiff_t rank = 0; rank < std::min(kShown, std::ssize(of_ranks)); ++rank) {
      where += (rank == 0 ? "" : ", ") + (world_->size() == 1 ? "" : c10::str("rank ", rank, "'s ")) +
               of_ranks[static_cast<size_t>(rank)];
    }
    if (std::ssize(of_ranks) > kShown) where += " and those of the other ranks";
    return where + ", where backward first comes to a gradient that is not finite at " + first_names(names);
  }
  return "";
}

void NonfiniteSearch::fail(const std::string& what, StepReader::NotFinite which, const std::string& remedy,
                           const std::vector<Batch>& batches, const Progress& progress) {
  const std::string weights = loaded_from_.empty() ? "" : list_nonfinite_weights(model_, world_);
  TORCH_CHECK(weights.empty(), what, ": of the weights loaded from ", loaded_from_, ", ", weights,
              "; training cannot mend them: take other files, or convert these again");
  std::string where;
  try {
    if (!batches.empty()) {
      const auto found = which == StepReader::NotFinite::kLoss ? find_in_outputs(batches, progress.samples)
                                                               : find_in_gradients(batches, progress.samples);
      where = found.empty()
                  ? " (computed again it is finite: dropout, or a device that does not compute the same twice)"
                  : ", in " + found;
    }
  } catch (const std::exception& error) {
    where = " (computed again to see where: " + error_text(error) + ")";
  }
  TORCH_CHECK(false, what, " at iteration ", progress.step + 1, where, remedy);
}

}  // namespace megashard
