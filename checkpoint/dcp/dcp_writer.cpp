#include "checkpoint/dcp/dcp_writer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/step_names.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/work_progress.h"
#include "checkpoint/values/gather_values.h"
#include "checkpoint/values/torch_archive.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
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
