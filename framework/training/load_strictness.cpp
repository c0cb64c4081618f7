#include "framework/training/load_strictness.h"

#include <algorithm>

#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

using Handling = LoadStrictness::Handling;

bool all_of_optimizer(const std::vector<std::string>& names) {
  return std::all_of(names.begin(), names.end(), is_optimizer_key);
}

std::string described(const char* kind, const std::vector<std::string>& names) {
  return std::string(kind) + " keys (" + std::to_string(names.size()) + "): " + listed(names);
}

}  // namespace

LoadStrictness load_strictness(const std::optional<std::string>& value) {
  if (!value || *value == "raise_all") return {};
  if (*value == "assume_ok_unexpected" || *value == "raise_unexpected") return {Handling::kRefuse, Handling::kIgnore};
  if (*value == "log_unexpected" || *value == "return_unexpected") return {Handling::kPrint, Handling::kIgnore};
  if (*value == "log_all" || *value == "return_all") return {Handling::kPrint, Handling::kPrint};
  if (*value == "ignore_all") return {Handling::kIgnore, Handling::kIgnore};
  throw UsageError("--dist-ckpt-strictness " + *value +
                   " is unknown; use raise_all (the default here), log_all or another of "
                   "Megatron's values.");
}

std::vector<std::string> judge_differences(const LoadReport& report, const LoadStrictness& strictness,
                                           const std::string& folder) {
  std::string refused;
  std::vector<std::string> lines;
  if (!report.missing.empty()) {
    const auto text = described("missing", report.missing);
    if (strictness.missing == Handling::kRefuse) refused += "; " + text;
    if (strictness.missing == Handling::kPrint) lines.push_back("WARNING: " + text + ": they keep their first values");
  }
  if (!report.unexpected.empty()) {
    const auto text = described("unexpected", report.unexpected);
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

}  // namespace megashard
