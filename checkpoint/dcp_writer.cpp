#include "checkpoint/dcp_writer.h"

#include <c10/util/Exception.h>

#include "checkpoint/agreement.h"
#include "checkpoint/dcp_plan.h"
#include "checkpoint/file_io.h"
#include "checkpoint/pickle_reader.h"
#include "checkpoint/pickle_writer.h"
#include "checkpoint/torch_archive.h"

namespace megashard {
namespace {

std::string data_file(size_t rank) { return "__" + std::to_string(rank) + "_0.distcp"; }

std::string encode_ranges(const std::vector<FileRange>& ranges) {
  List items;
  for (const auto& range : ranges) items.items.emplace_back(Tuple{{range.offset, range.length}});
  return write_pickle(items);
}

std::vector<FileRange> decode_ranges(const std::string& text) {
  std::vector<FileRange> ranges;
  const auto root = read_pickle(text, "what a rank has written");
  for (const auto& item : root.as_items()) {
    ranges.push_back({item.as_items().at(0).as_int(), item.as_items().at(1).as_int()});
  }
  return ranges;
}

void set_locations(SavePlan& plan, const std::vector<std::string>& results) {
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const auto ranges = decode_ranges(results[rank]);
    const auto& writes = plan.writes[rank];
    TORCH_INTERNAL_ASSERT(ranges.size() == writes.size());
    for (size_t i = 0; i < writes.size(); ++i) {
      auto& entry = plan.metadata.entries[writes[i].entry];
      auto& location = entry.is_tensor ? entry.chunks[writes[i].chunk].location : entry.location;
      location = {data_file(rank), ranges[i]};
    }
  }
}

}  // namespace

void save_dcp(const std::string& folder, const ShardedTensors& tensors, const Dict& values,
              const ProcessGroupPtr& group) {
  const auto rank = static_cast<size_t>(rank_in(group));
  std::vector<FlatValue> flat;
  const auto plans = gather_or_throw(group, [&] {
    flat = flatten_values(values);
    return encode_plan(make_rank_plan(tensors, flat));
  });
  SavePlan plan;
  const auto results = gather_or_throw(group, [&] {
    std::vector<RankPlan> decoded;
    for (const auto& text : plans) decoded.push_back(decode_plan(text));
    plan = make_save_plan(decoded);
    OutputFile file(folder + "/" + data_file(rank));
    std::vector<FileRange> ranges;
    for (const auto& write : plan.writes[rank]) {
      const bool is_value = write.item < flat.size();
      ranges.push_back(
          is_value ? write_stored_value(file, flat[write.item].value)
                   : write_stored_tensor(file, tensors[write.item - flat.size()].second.local));
    }
    file.sync_and_close();
    return encode_ranges(ranges);
  });
  all_or_throw(group, [&] {
    if (rank != 0) return;
    set_locations(plan, results);
    write_dcp_metadata(folder, plan.metadata);
  });
}

}  // namespace megashard
