#include "framework/training/loaded_weights.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "framework/diagnostics.h"
#include "parallel/collectives/agreement.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

using Handling = LoadStrictness::Handling;

bool all_of_optimizer(const std::vector<std::string>& names) {
  return std::all_of(names.begin(), names.end(), is_optimizer_key);
}

std::string described(const char* kind, std::vector<std::string> names, const StepNames& spelling) {
  for (auto& name : names) name = spelling.spelled(name);
  return std::string(kind) + " keys (" + std::to_string(names.size()) + "): " + listed(names);
}

}  // namespace

LoadStrictness load_strictness(const std::optional<StrictHandling>& value) {
  switch (value.value_or(StrictHandling::kRaiseAll)) {
    case StrictHandling::kAssumeOkUnexpected:
    case StrictHandling::kRaiseUnexpected:
      return {Handling::kRefuse, Handling::kIgnore};
    case StrictHandling::kLogUnexpected:
    case StrictHandling::kReturnUnexpected:
      return {Handling::kPrint, Handling::kIgnore};
    case StrictHandling::kLogAll:
    case StrictHandling::kReturnAll:
      return {Handling::kPrint, Handling::kPrint};
    case StrictHandling::kIgnoreAll:
      return {Handling::kIgnore, Handling::kIgnore};
    case StrictHandling::kRaiseAll:
      break;
  }
  return {};
}

std::vector<std::string> judge_differences(const LoadReport& report, const LoadStrictness& strictness,
                                           const std::string& folder) {
  std::string refused;
  std::vector<std::string> lines;
  if (!report.missing.empty()) {
    const auto text = described("missing", report.missing, report.names);
    if (strictness.missing == Handling::kRefuse) refused += "; " + text;
    if (strictness.missing == Handling::kPrint) lines.push_back("WARNING: " + text + ": they keep their first values");
  }
  if (!report.unexpected.empty()) {
    const auto text = described("unexpected", report.unexpected, report.names);
    if (strictness.unexpected == Handling::kRefuse) refused += "; " + text;
    if (strictness.unexpected == Handling::kPrint) lines.push_back("WARNING: " + text + ": they are not loaded");
  }
  if (refused.empty()) return lines;
  const bool only_optimizer = all_of_optimizer(report.missing) && all_of_optimizer(report.unexpected);
  const bool in_buckets = std::any_of(report.unexpected.begin(), report.unexpected.end(), is_optimizer_bucket);
  if (only_optimizer && in_buckets) {
    throw UsageError("the checkpoint " + folder +
                     " keeps the optimizer in buckets of Megatron's DistributedOptimizer, which "
                     "cannot be read here. --no-load-optim starts with a fresh optimizer; "
                     "Megatron's --dist-ckpt-optim-fully-reshardable saves one that can be read.");
  }
  throw UsageError("the checkpoint " + folder + " does not fit this run" + refused + ". " +
                   (only_optimizer ? "--no-load-optim starts with a fresh optimizer."
                                   : "Give the flags of the run that wrote it, or "
                                     "--dist-ckpt-strictness log_all to load what fits."));
}

bool is_finite(const at::Tensor& values) {
  // One pass finds out that all is well; sums of large finite values may overflow.
  return std::isfinite(values.sum().item<double>()) || values.isfinite().all().item<bool>();
}

std::string first_names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string list;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) list += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kShown) list += " and " + std::to_string(names.size() - kShown) + " more";
  return list;
}

std::string list_nonfinite_weights(const torch::nn::Module& model, const ProcessGroupPtr& group) {
  const c10::NoGradGuard no_grad;
  const auto of_ranks = gather_or_throw(group, [&] {
    std::string names;
    for (const auto& parameter : model.named_parameters()) {
      if (!is_finite(reshard_and_view(parameter.value()).local)) names += parameter.key() + "\n";
    }
    return names;
  });
  std::vector<std::string> names;
  for (const auto& of_rank : of_ranks) {
    std::istringstream lines(of_rank);
    for (std::string name; std::getline(lines, name);) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  if (names.empty()) return "";
  return first_names(names) + (names.size() == 1 ? " holds" : " hold") + " NaN or infinity";
}

void round_weights_to_bf16(const torch::nn::Module& model) {
  const c10::NoGradGuard no_grad;
  for (const auto& parameter : model.parameters()) {
    at::Tensor local = reshard_and_view(parameter).local.detach();
    if (local.scalar_type() == at::kFloat) local.copy_(local.to(at::kBFloat16));
  }
}

}  // namespace megashard
