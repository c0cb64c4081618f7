// Where a loss or a norm that is no number comes from: a trainer computes its step again to say so.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "framework/training/finite_weights.h"
#include "framework/training/output_watch.h"
#include "framework/training/trainer.h"
#include "parallel/collectives/agreement.h"
#include "parallel/guarded_tensor.h"

namespace megashard {
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

std::string Trainer::find_in_outputs() {
  OutputWatch watch(model_);
  std::string mine;
  const auto text_of = [this](size_t i) { return data_.microbatch_text(i, batches_.size(), state_.progress.samples); };
  for (size_t i = 0; i < batches_.size(); ++i) {
    const double loss = step_.evaluate(batches_[i])[0].item<double>();
    const auto module = watch.take_first();
    if (!mine.empty() || std::isfinite(loss)) continue;
    mine = text_of(i) + (module.empty() ? ", where each module's output is finite, but not the loss"
                                        : ", where the first output that is not finite is that of " + module);
  }
  const auto of_ranks = gather_or_throw(group_, [&] { return mine; });
  const auto found = std::ranges::find_if(of_ranks, [](const std::string& of_rank) { return !of_rank.empty(); });
  if (found == of_ranks.end()) return "";
  return (group_->size() == 1 ? "" : c10::str("rank ", found - of_ranks.begin(), ", ")) + *found;
}

std::string Trainer::find_in_gradients() {
  for (size_t i = 0; i < batches_.size(); ++i) {
    step_.backward({batches_[i]});
    const auto names = gradients_not_finite(model_, group_);
    if (names.empty()) continue;
    const auto of_ranks =
        gather_or_throw(group_, [&] { return data_.microbatch_text(i, batches_.size(), state_.progress.samples); });
    constexpr std::ptrdiff_t kShown = 4;
    std::string where;
    for (std::ptrdiff_t rank = 0; rank < std::min(kShown, std::ssize(of_ranks)); ++rank) {
      where += (rank == 0 ? "" : ", ") + (group_->size() == 1 ? "" : c10::str("rank ", rank, "'s ")) +
               of_ranks[static_cast<size_t>(rank)];
    }
    if (std::ssize(of_ranks) > kShown) where += " and those of the other ranks";
    return where + ", where backward first comes to a gradient that is not finite at " + first_names(names);
  }
  return "";
}

void Trainer::fail_on_nonfinite(const std::string& what, StepReader::NotFinite which, const std::string& remedy) {
  const std::string weights = has_stepped_ || weights_from_.empty() ? "" : weights_without_numbers(model_, group_);
  TORCH_CHECK(weights.empty(), what, ": of the weights loaded from ", weights_from_, ", ", weights,
              "; training cannot mend them: take other files, or convert these again");
  std::string where;
  try {  // an evaluation has no batches
    if (!batches_.empty()) {
      const auto found = which == StepReader::NotFinite::kLoss ? find_in_outputs() : find_in_gradients();
      where = found.empty()
                  ? " (computed again it is finite: dropout, or a device that does not compute the same twice)"
                  : ", in " + found;
    }
  } catch (const std::exception& error) {
    where = " (computed again to see where: " + error_text(error) + ")";
  }
  TORCH_CHECK(false, what, " at iteration ", state_.progress.step + 1, where, remedy);
}

}  // namespace megashard
