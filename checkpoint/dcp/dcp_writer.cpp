#include "checkpoint/dcp/dcp_writer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/step_names.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/files/work_progress.h"
#include "checkpoint/values/gather_values.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

bool overlap(const DcpChunk& a, const DcpChunk& b) {
  for (size_t i = 0; i < a.sizes.size(); ++i) {
    if (a.offsets[i] >= b.offsets[i] + b.sizes[i] || b.offsets[i] >= a.offsets[i] + a.sizes[i]) return false;
  }
  return true;
}

using Boxes = std::span<const DcpChunk*>;
constexpr int kMaxPartings = 16;  // nested shards need one per dimension of the tensor
constexpr size_t kMaxPairedBoxes = 4096;

/// Throws if two boxes overlap. Boxes on different sides of a plane do not; groups that no plane separates are compared
/// pairwise.
void check_apart(const std::string& key, Boxes boxes, int partings = 0) {
  const auto axes = boxes.size() < 2 || partings == kMaxPartings ? 0 : boxes[0]->sizes.size();
  for (size_t axis = 0; axis < axes; ++axis) {
    std::sort(boxes.begin(), boxes.end(),
              [axis](const auto* a, const auto* b) { return a->offsets[axis] < b->offsets[axis]; });
    size_t first = 0;
    int64_t end = 0;
    for (size_t i = 0; i < boxes.size(); ++i) {
      if (i > first && boxes[i]->offsets[axis] >= end) {
        check_apart(key, boxes.subspan(first, i - first), partings + 1);
        first = i;
      }
      end = std::max(end, boxes[i]->offsets[axis] + boxes[i]->sizes[axis]);
    }
    if (first > 0) return check_apart(key, boxes.subspan(first), partings + 1);
  }
  TORCH_CHECK(boxes.size() <= kMaxPairedBoxes, "tensor ", key, " has ", boxes.size(),
              " shards that no plane parts, which no sharding makes");
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = i + 1; j < boxes.size(); ++j) {
      TORCH_CHECK(!overlap(*boxes[i], *boxes[j]), "tensor ", key, " has shards that overlap, at ",
                  describe_sizes(boxes[i]->offsets), " and ", describe_sizes(boxes[j]->offsets));
    }
  }
}

}  // namespace

void check_tiling(const std::string& key, const DcpTensor& tensor) {
  std::vector<const DcpChunk*> chunks;
  int64_t volume = 0;
  for (const auto& chunk : tensor.chunks) {
    const auto numel = checked_numel(chunk.sizes).value_or(0);
    for (size_t i = 0; i < tensor.sizes.size(); ++i) {
      TORCH_CHECK(chunk.offsets[i] >= 0 && chunk.offsets[i] + chunk.sizes[i] <= tensor.sizes[i], "tensor ", key,
                  " of sizes ", describe_sizes(tensor.sizes), " has a shard at ", describe_sizes(chunk.offsets),
                  " of sizes ", describe_sizes(chunk.sizes), ", which lies outside it");
    }
    TORCH_CHECK(!__builtin_add_overflow(volume, numel, &volume), "the shards of tensor ", key,
                " hold more than it has");
    if (numel > 0) chunks.push_back(&chunk);
  }
  check_apart(key, chunks);
  const auto whole = checked_numel(tensor.sizes).value_or(-1);
  TORCH_CHECK(volume == whole, "the shards of tensor ", key, " hold ", volume, " of its ", whole, " elements");
}

namespace {

class PlanMerger {
 public:
  explicit PlanMerger(const std::vector<RankPlan>& plans) : plans_(plans), bytes_(plans.size()) {
    plan_.writes.resize(plans.size());
  }

  SavePlan merge() {
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      for (size_t item = 0; item < plans_[rank].size(); ++item) collect(rank, item);
    }
    for (const auto& entry : plan_.metadata.entries) {
      if (const auto* tensor = entry.tensor()) check_tiling(entry.key, *tensor);
    }
    assign();
    return std::move(plan_);
  }

 private:
  struct Holders {
    size_t entry;
    size_t chunk;
    std::vector<std::pair<size_t, size_t>> places;  // rank, item
  };

  void collect(size_t rank, size_t number) {
    const auto& item = plans_[rank][number];
    auto& entries = plan_.metadata.entries;
    const auto [found, is_new] = entry_of_.emplace(item.key, entries.size());
    if (is_new) {
      entries.push_back({.key = item.key, .path = item.path, .stored = DcpBytes()});
      if (item.is_tensor) entries.back().stored = DcpTensor{.dtype = item.dtype, .sizes = item.global_sizes};
      chunk_of_.emplace_back();
    }
    static const DcpTensor kPlainValue;
    auto* tensor = entries[found->second].tensor();
    const auto& planned = tensor == nullptr ? kPlainValue : *tensor;
    TORCH_CHECK_VALUE(
        (tensor != nullptr) == item.is_tensor && planned.dtype == item.dtype && planned.sizes == item.global_sizes,
        "ranks disagree on ", item.key, ": ", torch_dtype_name(planned.dtype), describe_sizes(planned.sizes),
        " and, on rank ", rank, ", ", torch_dtype_name(item.dtype), describe_sizes(item.global_sizes));
    const auto [holder, first] = chunk_of_[found->second].emplace(item.offsets, holders_.size());
    if (first) {
      holders_.push_back({found->second, planned.chunks.size(), {}});
      if (tensor != nullptr) tensor->chunks.push_back({.offsets = item.offsets, .sizes = item.sizes});
    } else if (tensor != nullptr) {
      const auto& chunk = tensor->chunks[holders_[holder->second].chunk];
      TORCH_CHECK_VALUE(chunk.sizes == item.sizes, "ranks hold ", describe_sizes(chunk.sizes), " and ",
                        describe_sizes(item.sizes), " elements of ", item.key, " at ", describe_sizes(item.offsets));
    }
    holders_[holder->second].places.emplace_back(rank, number);
  }

  /// Assigns items that only one rank may write, then the others to the rank with the least to write.
  void assign() {
    std::vector<size_t> owner(holders_.size(), SIZE_MAX);
    for (size_t i = 0; i < holders_.size(); ++i) {
      const auto& places = holders_[i].places;
      const auto& [rank, item] = places.front();
      if (places.size() == 1 || plans_[rank][item].is_unsharded) owner[i] = claim(holders_[i], 0);
    }
    for (size_t i = 0; i < holders_.size(); ++i) {
      if (owner[i] != SIZE_MAX) continue;
      const auto& places = holders_[i].places;
      size_t best = 0;
      for (size_t p = 1; p < places.size(); ++p) {
        if (bytes_[places[p].first] < bytes_[places[best].first]) best = p;
      }
      owner[i] = claim(holders_[i], best);
    }
    for (size_t i = 0; i < holders_.size(); ++i) {
      const auto& holder = holders_[i];
      const auto [rank, item] = holder.places[owner[i]];
      plan_.writes[rank].push_back({item, holder.entry, holder.chunk});
    }
    for (auto& writes : plan_.writes) {
      std::sort(writes.begin(), writes.end(), [](const auto& a, const auto& b) { return a.item < b.item; });
    }
  }

  size_t claim(const Holders& holders, size_t place) {
    const auto [rank, item] = holders.places[place];
    bytes_[rank] += plans_[rank][item].bytes();
    return place;
  }

  const std::vector<RankPlan>& plans_;
  std::vector<int64_t> bytes_;
  SavePlan plan_;
  std::unordered_map<std::string, size_t> entry_of_;
  std::vector<std::map<std::vector<int64_t>, size_t>> chunk_of_;  // entry -> offsets -> index in holders_
  std::vector<Holders> holders_;
};

std::vector<int64_t> sizes_in(const Value& value) {
  const auto* size = value.get_if<TorchSize>();
  TORCH_CHECK(size != nullptr, "expected sizes, got ", value.kind());
  return size->sizes;
}

}  // namespace

int64_t WriteItem::bytes() const { return is_tensor ? tensor_bytes({key, dtype, sizes}) : 1; }

RankPlan make_rank_plan(const ShardedTensors& tensors, const std::vector<FlatValue>& values) {
  RankPlan plan;
  for (const auto& value : values) plan.push_back({.key = value.key, .path = value.path});
  for (const auto& [key, tensor] : tensors) {
    const auto dimensions = static_cast<size_t>(tensor.local.dim());
    TORCH_CHECK_VALUE(tensor.global_sizes.size() == dimensions && tensor.offsets.size() == dimensions, "tensor ", key,
                      ": the local shard has ", dimensions, " dimensions, its global sizes ",
                      tensor.global_sizes.size(), ", its offsets ", tensor.offsets.size());
    plan.push_back({.key = key,
                    .path = tensor_path(key),
                    .is_tensor = true,
                    .dtype = tensor.local.scalar_type(),
                    .global_sizes = tensor.global_sizes,
                    .offsets = tensor.offsets,
                    .sizes = tensor.local.sizes().vec(),
                    .is_unsharded = tensor.is_replicated()});
  }
  return plan;
}

Value plan_value(const RankPlan& plan) {
  List items;
  for (const auto& item : plan) {
    items.items.emplace_back(
        Tuple{{item.key, Tuple{item.path}, item.is_tensor, item.dtype, TorchSize{item.global_sizes},
               TorchSize{item.offsets}, TorchSize{item.sizes}, item.is_unsharded}});
  }
  return items;
}

RankPlan plan_of(const Value& value) {
  RankPlan plan;
  for (const auto& encoded : value.as_items()) {
    const auto& fields = encoded.as_items();
    const auto* dtype = fields.at(3).get_if<at::ScalarType>();
    TORCH_CHECK(dtype != nullptr, "the plan of a rank has no dtype");
    plan.push_back({.key = fields.at(0).as_string(),
                    .path = fields.at(1).as_items(),
                    .is_tensor = fields.at(2).as_bool(),
                    .dtype = *dtype,
                    .global_sizes = sizes_in(fields.at(4)),
                    .offsets = sizes_in(fields.at(5)),
                    .sizes = sizes_in(fields.at(6)),
                    .is_unsharded = fields.at(7).as_bool()});
  }
  return plan;
}

SavePlan make_save_plan(const std::vector<RankPlan>& plans) { return PlanMerger(plans).merge(); }

namespace {

/// Result of a rank: its data file and the ranges of its items in the plan's order.
Value written_value(const WrittenFile& file, const std::vector<FileRange>& ranges) {
  List items;
  for (const auto& range : ranges) items.items.emplace_back(Tuple{{range.offset, range.length}});
  return Tuple{{file.name, file.bytes, int64_t{file.crc32}, std::move(items)}};
}

WrittenFile file_in(const Value& written) {
  const auto& fields = written.as_items();
  return {fields.at(0).as_string(), fields.at(1).as_int(), static_cast<uint32_t>(fields.at(2).as_int())};
}

/// Adds the ranks' locations to the metadata and returns the files.
std::vector<WrittenFile> collect(const SavePlan& plan, DcpMetadata& metadata, const std::vector<Value>& results) {
  std::vector<WrittenFile> files;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    files.push_back(file_in(results[rank]));
    const auto& ranges = results[rank].as_items().at(3).as_items();
    const auto& writes = plan.writes[rank];
    TORCH_INTERNAL_ASSERT(ranges.size() == writes.size());
    for (size_t i = 0; i < writes.size(); ++i) {
      auto& entry = metadata.entries[writes[i].entry];
      auto* tensor = entry.tensor();
      auto& location =
          tensor != nullptr ? tensor->chunks[writes[i].chunk].location : std::get<DcpBytes>(entry.stored).location;
      const auto& range = ranges[i].as_items();
      location = {files.back().name, {range.at(0).as_int(), range.at(1).as_int()}};
    }
  }
  return files;
}

/// Merges the items of all ranks. Reuses the plan in `cache` if all ranks agree, in one exchange, that theirs are
/// unchanged.
std::shared_ptr<const SavePlan> plan_save(const ShardedTensors& tensors, const std::vector<FlatValue>& values,
                                          const ProcessGroupPtr& group, SavePlanCache& cache) {
  RankPlan mine;
  auto plans = gather_values(group, [&] {
    mine = make_rank_plan(tensors, values);
    return cache.plan != nullptr && mine == cache.mine ? Value() : plan_value(mine);
  });
  const auto unchanged = std::count(plans.begin(), plans.end(), Value());
  if (unchanged == static_cast<int64_t>(plans.size())) return cache.plan;
  if (unchanged > 0) plans = gather_values(group, [&] { return plan_value(mine); });
  auto plan = std::make_shared<SavePlan>();
  all_or_throw(group, [&] {
    std::vector<RankPlan> decoded;
    for (const auto& sent : plans) decoded.push_back(plan_of(sent));
    *plan = make_save_plan(decoded);
  });
  cache.mine = std::move(mine);
  cache.plan = plan;
  return plan;
}

int64_t bytes_to_write(const SavePlan& plan, const RankPlan& mine, size_t rank) {
  int64_t bytes = 0;
  for (const auto& write : plan.writes[rank]) bytes += mine[write.item].bytes();
  return bytes;
}

}  // namespace

std::vector<WrittenFile> save_dcp(const std::string& folder, const ShardedTensors& tensors, const Dict& values,
                                  const ProcessGroupPtr& group, SavePlanCache* plans, const DcpNaming& naming) {
  std::vector<FlatValue> flat;
  all_or_throw(group, [&] { flat = flatten_values(values); });
  return save_dcp(folder, tensors, flat, group, plans, naming);
}

std::vector<WrittenFile> save_dcp(const std::string& folder, const ShardedTensors& tensors,
                                  const std::vector<FlatValue>& values, const ProcessGroupPtr& group,
                                  SavePlanCache* plans, const DcpNaming& naming) {
  const auto rank = static_cast<size_t>(rank_in(group));
  SavePlanCache only_now;
  SavePlanCache& cache = plans == nullptr ? only_now : *plans;
  const auto plan = plan_save(tensors, values, group, cache);
  const auto results = gather_values(group, [&] {
    const auto bytes = bytes_to_write(*plan, cache.mine, rank);
    LongWork work("save", bytes);
    OutputFile file(folder + "/" + data_file_name(rank), bytes);
    std::vector<FileRange> ranges;
    for (const auto& write : plan->writes[rank]) {
      const bool is_value = write.item < values.size();
      ranges.push_back(is_value ? write_stored_value(file, values[write.item].value)
                                : write_stored_tensor(file, tensors[write.item - values.size()].second.local));
      work.add(cache.mine[write.item].bytes());
    }
    return written_value(file.sync_and_close(), ranges);
  });
  std::vector<WrittenFile> files;
  all_or_throw(group, [&] {
    if (rank != 0) return;
    DcpMetadata metadata = plan->metadata;
    files = collect(*plan, metadata, results);
    add_tied_keys(metadata, naming.tied);
    if (naming.bare_names) take_bare_names(metadata);
    files.push_back(write_dcp_metadata(folder, metadata));
  });
  return files;
}

}  // namespace megashard
