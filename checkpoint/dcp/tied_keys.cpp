#include "checkpoint/dcp/tied_keys.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

bool is_stored(const DcpChunk& chunk) { return !chunk.location.file.empty() && chunk.location.range.length > 0; }

bool is_same_chunk(const DcpChunk& one, const DcpChunk& other) {
  return one.offsets == other.offsets && one.sizes == other.sizes && one.leading_ones == other.leading_ones &&
         one.location.file == other.location.file && one.location.range.offset == other.location.range.offset &&
         one.location.range.length == other.location.range.length;
}

bool is_same_tensor(const DcpTensor& one, const DcpTensor& other) {
  return one.dtype == other.dtype && one.sizes == other.sizes &&
         std::equal(one.chunks.begin(), one.chunks.end(), other.chunks.begin(), other.chunks.end(), is_same_chunk);
}

}  // namespace

void add_tied_keys(DcpMetadata& metadata, const TiedKeys& tied) {
  for (const auto& [key, first] : tied) {
    const auto found = std::find_if(metadata.entries.begin(), metadata.entries.end(),
                                    [&name = first](const DcpEntry& entry) { return entry.key == name; });
    TORCH_CHECK_VALUE(found != metadata.entries.end(), key, " is to share the bytes of ", first,
                      ", which is not saved");
    DcpEntry entry = *found;
    entry.key = key;
    entry.path = tensor_path(key);
    metadata.entries.push_back(std::move(entry));
  }
}

TiedKeys find_tied_keys(const std::vector<DcpEntry>& entries) {
  TiedKeys tied;
  std::map<std::pair<std::string, int64_t>, const DcpEntry*> firsts;  // (file, offset of chunk 0) -> entry
  for (const auto& entry : entries) {
    const auto* tensor = entry.tensor();
    if (tensor == nullptr || tensor->chunks.empty()) continue;
    if (!std::all_of(tensor->chunks.begin(), tensor->chunks.end(), is_stored)) continue;
    const auto& location = tensor->chunks[0].location;
    const auto [first, is_new] = firsts.emplace(std::pair(location.file, location.range.offset), &entry);
    const auto& other = *first->second;
    if (!is_new && is_same_tensor(*tensor, *other.tensor())) tied.emplace_back(entry.key, other.key);
  }
  return tied;
}

}  // namespace megashard
