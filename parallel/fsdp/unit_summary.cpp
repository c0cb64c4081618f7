#include "parallel/fsdp/unit_summary.h"

#include <memory>
#include <unordered_map>

#include "parallel/fsdp/detail/fsdp_state.h"

namespace megashard {
namespace {

using Paths = std::unordered_map<const FsdpState*, std::string>;

std::vector<std::string> paths_of(const std::vector<std::weak_ptr<FsdpState>>& units, const Paths& paths) {
  std::vector<std::string> names;
  for (const auto& unit : units) {
    if (const auto state = unit.lock()) names.push_back(paths.at(state.get()));
  }
  return names;
}

UnitSummary summary_of(const FsdpParamGroup& group) {
  const auto& params = group.params();
  UnitSummary summary{.ranks = params.front()->geometry().ranks,
                      .stored = params.front()->stored_dtype(),
                      .computed_in = params.front()->compute_dtype()};
  for (const auto& param : params) {
    const auto& geometry = param->geometry();
    summary.parameters += geometry.numel;
    summary.sharded_bytes += geometry.chunk_numel * static_cast<int64_t>(c10::elementSize(param->stored_dtype()));
    summary.gathered_bytes += geometry.numel * static_cast<int64_t>(c10::elementSize(param->compute_dtype()));
  }
  return summary;
}

}  // namespace

std::vector<UnitSummary> unit_summaries(const torch::nn::Module& root) {
  Paths paths;
  std::vector<std::shared_ptr<FsdpState>> states;
  const auto add = [&](const std::string& path, const torch::nn::Module& module) {
    auto state = fsdp_state(module);
    if (state != nullptr && paths.emplace(state.get(), path).second) states.push_back(std::move(state));
  };
  add("", root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) add(item.key(), *item.value());
  std::vector<UnitSummary> summaries;
  for (const auto& state : states) {
    for (const auto& group : state->groups()) {
      UnitSummary summary = summary_of(*group);
      summary.module = paths.at(state.get());
      summary.forward_prefetch = paths_of(state->forward_prefetch, paths);
      summary.backward_prefetch = paths_of(state->backward_prefetch, paths);
      summaries.push_back(std::move(summary));
    }
  }
  return summaries;
}

}  // namespace megashard
