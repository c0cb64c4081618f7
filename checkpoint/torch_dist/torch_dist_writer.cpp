#include "checkpoint/torch_dist/torch_dist_writer.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <optional>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/device_mesh.h"

namespace megashard {
namespace {

constexpr const char* kConfig = R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
                                R"("common_backend": "torch", "common_backend_version": 1})";

/// Number of ranks that share dimension 0.
int64_t sharding_size(const ShardedTensor& tensor) {
  int64_t ranks = 1;
  for (size_t i = 0; i < tensor.placements.size(); ++i) {
    const auto& placement = tensor.placements[i];
    const bool cuts = placement.kind != Placement::Kind::kReplicate && placement.dim == 0;
    if (cuts) ranks *= tensor.mesh->size(static_cast<int>(i));
  }
  return ranks;
}

/// The step of all parameters; nullopt if there is none or they differ.
std::optional<double> common_step(const ShardedTensors& tensors) {
  std::optional<double> step;
  for (const auto& [key, tensor] : tensors) {
    if (!is_optimizer_step(key)) continue;
    const auto mine = tensor.local.item().toDouble();
    if (step && *step != mine) return std::nullopt;
    step = mine;
  }
  return step;
}

/// Moves the names out of the groups, because Megatron puts its own parameters there. They are stored separately, for
/// loading.
void take_group_names(Dict& optimizer, Dict& common) {
  auto* groups = optimizer.find(kParamGroupsKey);
  auto* list = groups == nullptr ? nullptr : groups->get_if<List>();
  if (list == nullptr) return;
  List names;
  for (auto& item : list->items) {
    auto* group = item.get_if<Dict>();
    const auto* params = group == nullptr ? nullptr : group->find(kParamsKey);
    if (params == nullptr) return;
    names.items.push_back(*params);
    std::erase_if(group->entries, [](const auto& entry) { return entry.first == Value(kParamsKey); });
  }
  common.set(kTorchDistGroupNames, std::move(names));
}

/// Moves random states from the common values to objects: one per rank, or Megatron's list over ranks as one.
void take_random_states(TorchDistState& state, int world) {
  const auto* found = state.common.find(kRngStateKey);
  const auto* by_rank = found == nullptr ? nullptr : found->get_if<Dict>();
  if (by_rank == nullptr && (found == nullptr || found->get_if<List>() == nullptr)) return;
  const auto add = [&](const std::string& shard, const Value& object) {
    const auto key = std::string(kRngStateShard) + shard;
    state.objects.push_back({key, {key}, List{{object}}});
  };
  if (by_rank == nullptr) {
    add(kAllRanks, *found);
  } else {
    for (const auto& [rank, random] : by_rank->entries) add(rank.as_string() + "_" + std::to_string(world), random);
  }
  std::erase_if(state.common.entries, [](const auto& entry) { return entry.first == Value(kRngStateKey); });
}

}  // namespace

std::string check_torch_dist_shards(const ShardedTensors& tensors) {
  std::string uneven;
  size_t count = 0;
  for (const auto& [key, tensor] : tensors) {
    const auto ranks = sharding_size(tensor);
    if (ranks == 1 || tensor.global_sizes.empty()) continue;
    const auto rows = tensor.global_sizes[0];
    TORCH_CHECK_VALUE(rows >= ranks, "weight ", key, " of sizes ", describe_sizes(tensor.global_sizes),
                      " is shared by ", ranks,
                      " ranks, more than its first dimension has rows, which --ckpt-format torch_dist cannot hold; use "
                      "--ckpt-format torch_dcp, or a smaller sharding_size");
    if (rows % ranks == 0) continue;
    if (count++ == 0)
      uneven = key + " " + describe_sizes(tensor.global_sizes) + " over " + std::to_string(ranks) + " ranks";
  }
  if (count == 0) return {};
  return std::to_string(count) + " tensors are cut unevenly (" + uneven + (count > 1 ? ", ...)" : ")") +
         ": megatron-core loads such a torch_dist checkpoint, but its own FSDP2 writer could not "
         "have produced it";
}

TorchDistState to_torch_dist(const ShardedTensors& tensors, const Dict& values, int world) {
  TorchDistState state;
  state.common = values;
  const auto step = common_step(tensors);
  ShardedTensors stored;
  for (const auto& entry : tensors) {
    if (!step || !is_optimizer_step(entry.first)) stored.push_back(entry);
  }
  state.tensors = stack_layers(stored);

  Dict optimizer;
  if (const auto* given = values.find(kOptimizerKey)) optimizer = given->as_dict();
  take_group_names(optimizer, state.common);
  if (step) {
    Dict of_state;
    // a tensor, as the step of torch's AdamW
    of_state.set(kCommonStep, tensor_value(at::full({}, *step, at::TensorOptions(at::kFloat))));
    optimizer.set(kStateKey, std::move(of_state));
  }
  if (!optimizer.entries.empty()) state.common.set(kOptimizerKey, std::move(optimizer));
  take_random_states(state, world);
  Dict content;
  content.set("singleton_local_shards", false);
  content.set("chained_optim_avoid_prefix", true);
  state.common.set(kContentMetadata, std::move(content));
  return state;
}

std::vector<WrittenFile> save_torch_dist(const std::string& folder, const ShardedTensors& tensors, const Dict& values,
                                         const ProcessGroupPtr& group, SavePlanCache* plans) {
  TorchDistState state;
  std::vector<WrittenFile> own;
  const bool is_first = rank_in(group) == 0;
  all_or_throw(group, [&] {
    check_torch_dist_shards(tensors);
    state = to_torch_dist(tensors, values, group == nullptr ? 1 : group->size());
    if (is_first) own.push_back(write_torch_dist_common(folder, state.common));
  });
  auto files = save_dcp(folder, state.tensors, state.objects, group, plans);
  all_or_throw(group, [&] {
    if (is_first) own.push_back(write_torch_dist_config(folder));
  });
  files.insert(files.end(), own.begin(), own.end());
  return files;
}

WrittenFile write_torch_dist_common(const std::string& folder, const Dict& common) {
  OutputFile file(folder + "/" + kCommonFile);
  write_stored_value(file, common);
  return file.sync_and_close();
}

WrittenFile write_torch_dist_config(const std::string& folder) {
  return write_file_atomically(folder + "/" + kFormatFile, kConfig);
}

}  // namespace megashard
