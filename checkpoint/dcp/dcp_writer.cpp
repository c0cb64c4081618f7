#include "checkpoint/dcp/dcp_writer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>

#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/agreement.h"
#include "checkpoint/steps/step_files.h"
#include "checkpoint/values/pickle_reader.h"
#include "checkpoint/values/pickle_writer.h"
#include "checkpoint/values/torch_archive.h"

namespace megashard {
namespace {

/// A rank's data file as it is on the disk.
struct Written {
  ManifestFile file;
  std::vector<FileRange> ranges;  ///< of the items, in the plan's order
};

std::string encode_written(const Written& written) {
  List items;
  const auto add = [&items](int64_t first, int64_t second) {
    items.items.emplace_back(Tuple{{first, second}});
  };
  add(written.file.bytes, written.file.crc32);
  for (const auto& range : written.ranges) add(range.offset, range.length);
  return write_pickle(items);
}

Written decode_written(const std::string& text, size_t rank) {
  Written written;
  const auto root = read_pickle(text, "what a rank has written");
  for (const auto& item : root.as_items()) {
    written.ranges.push_back({item.as_items().at(0).as_int(), item.as_items().at(1).as_int()});
  }
  const auto first = written.ranges.at(0);
  written.file = {data_file_name(rank), first.offset, static_cast<uint32_t>(first.length)};
  written.ranges.erase(written.ranges.begin());
  return written;
}

/// Puts the locations into the metadata and returns the files.
std::vector<ManifestFile> collect(const SavePlan& plan, DcpMetadata& metadata,
                                  const std::vector<std::string>& results) {
  std::vector<ManifestFile> files;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const auto [file, ranges] = decode_written(results[rank], rank);
    files.push_back(file);
    const auto& writes = plan.writes[rank];
    TORCH_INTERNAL_ASSERT(ranges.size() == writes.size());
    for (size_t i = 0; i < writes.size(); ++i) {
      auto& entry = metadata.entries[writes[i].entry];
      auto& location = entry.is_tensor ? entry.chunks[writes[i].chunk].location : entry.location;
      location = {file.name, ranges[i]};
    }
  }
  return files;
}

/// Every rank's items, merged; the plan of `cache` where all have said, in one exchange, that
/// theirs are the same.
std::shared_ptr<const SavePlan> plan_save(const ShardedTensors& tensors,
                                          const std::vector<FlatValue>& values,
                                          const ProcessGroupPtr& group, SavePlanCache& cache) {
  RankPlan mine;
  auto plans = gather_or_throw(group, [&] {
    mine = make_rank_plan(tensors, values);
    return cache.plan != nullptr && mine == cache.mine ? std::string() : encode_plan(mine);
  });
  const auto unchanged = std::count(plans.begin(), plans.end(), std::string());
  if (unchanged == static_cast<int64_t>(plans.size())) return cache.plan;
  if (unchanged > 0) plans = gather_or_throw(group, [&] { return encode_plan(mine); });
  auto plan = std::make_shared<SavePlan>();
  all_or_throw(group, [&] {
    std::vector<RankPlan> decoded;
    for (const auto& text : plans) decoded.push_back(decode_plan(text));
    *plan = make_save_plan(decoded);
  });
  cache = {std::move(mine), plan};
  return plan;
}

int64_t bytes_to_write(const SavePlan& plan, const RankPlan& mine, size_t rank) {
  int64_t bytes = 0;
  for (const auto& write : plan.writes[rank]) bytes += mine[write.item].bytes();
  return bytes;
}

}  // namespace

std::vector<ManifestFile> save_dcp(const std::string& folder, const ShardedTensors& tensors,
                                   const Dict& values, const ProcessGroupPtr& group,
                                   SavePlanCache* plans, const TiedKeys& tied) {
  std::vector<FlatValue> flat;
  all_or_throw(group, [&] { flat = flatten_values(values); });
  return save_dcp(folder, tensors, flat, group, plans, tied);
}

std::vector<ManifestFile> save_dcp(const std::string& folder, const ShardedTensors& tensors,
                                   const std::vector<FlatValue>& values,
                                   const ProcessGroupPtr& group, SavePlanCache* plans,
                                   const TiedKeys& tied) {
  const auto rank = static_cast<size_t>(rank_in(group));
  SavePlanCache only_now;
  SavePlanCache& cache = plans == nullptr ? only_now : *plans;
  const auto plan = plan_save(tensors, values, group, cache);
  const auto results = gather_or_throw(group, [&] {
    OutputFile file(folder + "/" + data_file_name(rank), bytes_to_write(*plan, cache.mine, rank));
    std::vector<FileRange> ranges;
    for (const auto& write : plan->writes[rank]) {
      const bool is_value = write.item < values.size();
      ranges.push_back(
          is_value ? write_stored_value(file, values[write.item].value)
                   : write_stored_tensor(file, tensors[write.item - values.size()].second.local));
    }
    file.sync_and_close();
    return encode_written({manifest_entry(file), ranges});
  });
  std::vector<ManifestFile> files;
  all_or_throw(group, [&] {
    if (rank != 0) return;
    DcpMetadata metadata = plan->metadata;
    files = collect(*plan, metadata, results);
    add_tied_keys(metadata, tied);
    files.push_back(write_dcp_metadata(folder, metadata));
  });
  return files;
}

}  // namespace megashard
