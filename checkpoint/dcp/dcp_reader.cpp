#include "checkpoint/dcp/dcp_reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {

namespace {

class Verification {
 public:
  Verification(const std::string& folder, const FaultSink& fault) : folder_(folder), fault_(fault) {}

  void check_tensor(const DcpEntry& entry, const DcpTensor& tensor) {
    attempt(entry.key, [&] { check_tiling(entry.key, tensor); });
    for (const auto& chunk : tensor.chunks) {
      check_item(entry.key + " at " + describe_sizes(chunk.offsets), chunk.location,
                 [&](const InputFile& file) { find_stored_chunk(file, entry.key, tensor, chunk); });
    }
  }

  void check_bytes(const DcpEntry& entry, const DcpBytes& bytes) {
    check_item(entry.key, bytes.location,
               [&](const InputFile& file) { read_stored_value(file, bytes.location.range); });
  }

  void check_common() {
    const auto common = folder_ + "/" + kCommonFile;
    if (!path_exists(common)) return;
    attempt(kCommonFile, [&] {
      const InputFile file(common);
      checked_ += verify_archive(TorchArchive(file, {0, file.size()}), kCommonFile, fault_);
    });
  }

  void check_overlaps(const DcpMetadata& stored) const {
    std::map<std::string, std::vector<std::pair<FileRange, const DcpEntry*>>> items;
    std::set<std::string> further;
    for (const auto& [key, first] : find_tied_keys(stored.entries)) further.insert(key);
    for (const auto& entry : stored.entries) {
      if (further.count(entry.key) != 0) continue;
      for (const auto& location : entry.locations()) items[location.file].emplace_back(location.range, &entry);
    }
    for (auto& [file, ranges] : items) {
      std::sort(ranges.begin(), ranges.end(),
                [](const auto& a, const auto& b) { return a.first.offset < b.first.offset; });
      for (size_t i = 1; i < ranges.size(); ++i) {
        const auto& [before, owner] = ranges[i - 1];
        if (ranges[i].first.offset - before.offset >= before.length) continue;
        fault_(folder_ + "/" + file + " at byte " + std::to_string(ranges[i].first.offset) + ": " +
               ranges[i].second->key + " and " + owner->key + " lie over each other");
      }
    }
  }

  const CheckedBytes& checked() const { return checked_; }

 private:
  void attempt(const std::string& item, const std::function<void()>& work) const {
    try {
      work();
    } catch (const c10::Error& error) {
      fault_(std::string(error.what_without_backtrace()) + " (" + item + ")");
    }
  }

  void check_item(const std::string& item, const DcpLocation& location,
                  const std::function<void(const InputFile& file)>& check_content) {
    attempt(item, [&] {
      TORCH_CHECK(!location.file.empty(), folder_, "/.metadata does not say where it is stored");
      const InputFile file(folder_ + "/" + location.file);
      checked_ += verify_archive(TorchArchive(file, location.range), item, fault_);
      check_content(file);
    });
  }

  const std::string& folder_;
  const FaultSink& fault_;
  CheckedBytes checked_;
};

/// Verifies every byte of a step's folder except its manifest; `entries` are its tensors, from DcpReader. Checks each
/// item against its CRC-32 and the metadata, that chunks tile their tensors, and that items do not overlap; several
/// keys may share one tensor.
CheckedBytes verify_dcp(const std::string& folder, const std::vector<DcpEntry>& entries, const FaultSink& fault) {
  Verification verification(folder, fault);
  for (const auto& entry : entries) {
    if (const auto* tensor = entry.tensor()) verification.check_tensor(entry, *tensor);
  }
  // Values as stored, because torch_dist's reader converts some of them.
  const auto stored = read_dcp_metadata(folder);
  for (const auto& entry : stored.entries) {
    if (const auto* bytes = std::get_if<DcpBytes>(&entry.stored)) verification.check_bytes(entry, *bytes);
  }
  verification.check_overlaps(stored);
  verification.check_common();
  return verification.checked();
}

constexpr int64_t kBytesAtOnce = 64 << 20;

/// Intersection of a chunk and a shard, as offsets in each.
struct Overlap {
  std::vector<int64_t> in_chunk;
  std::vector<int64_t> in_local;
  std::vector<int64_t> sizes;
  int64_t numel = 1;
};

Overlap intersect(const DcpChunk& chunk, const ShardedTensor& into) {
  Overlap box;
  for (size_t i = 0; i < chunk.sizes.size(); ++i) {
    const auto begin = std::max(chunk.offsets[i], into.offsets[i]);
    const auto local_end = into.offsets[i] + into.local.size(static_cast<int64_t>(i));
    const auto size = std::max<int64_t>(0, std::min(chunk.offsets[i] + chunk.sizes[i], local_end) - begin);
    box.in_chunk.push_back(begin - chunk.offsets[i]);
    box.in_local.push_back(begin - into.offsets[i]);
    box.sizes.push_back(size);
    box.numel *= size;
  }
  return box;
}

at::Tensor narrow_to(at::Tensor tensor, const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes,
                     size_t from) {
  for (size_t i = from; i < sizes.size(); ++i) tensor = tensor.narrow(static_cast<int64_t>(i), offsets[i], sizes[i]);
  return tensor;
}

/// True if the box is whole rows of the chunk and `target` is contiguous CPU memory of the same dtype.
bool can_read_into(const at::Tensor& target, const StoredTensor& stored, const Overlap& box) {
  return target.device().is_cpu() && target.is_contiguous() && target.scalar_type() == stored.dtype &&
         stored.is_contiguous() &&
         (box.sizes.empty() || std::equal(box.sizes.begin() + 1, box.sizes.end(), stored.sizes.begin() + 1));
}

/// True if the tensor is a part of a plain value: torch_dcp stores tensors in lists of dicts (and in rng_state, of any
/// shape) apart from the rest. False for weights and optimizer state.
bool is_in_value(const DcpEntry& entry) {
  if (entry.path.empty() || is_model_key(entry.key) || entry.key.starts_with(kOptimizerStatePrefix)) return false;
  return entry.path[0] == Value(kRngStateKey) ||
         std::any_of(entry.path.begin(), entry.path.end(),
                     [](const Value& part) { return part.get_if<int64_t>() != nullptr; });
}

}  // namespace

StoredTensor find_stored_chunk(const InputFile& file, const std::string& key, const DcpTensor& tensor,
                               const DcpChunk& chunk) {
  auto stored = find_stored_tensor(file, chunk.location.range);
  for (int left = chunk.leading_ones; left > 0 && !stored.sizes.empty() && stored.sizes[0] == 1; --left) {
    stored.sizes.erase(stored.sizes.begin());
    stored.strides.erase(stored.strides.begin());
  }
  TORCH_CHECK(stored.dtype == tensor.dtype && stored.sizes == chunk.sizes, file.path(), " at byte ",
              chunk.location.range.offset, ": found ", torch_dtype_name(stored.dtype), describe_sizes(stored.sizes),
              " instead of ", torch_dtype_name(tensor.dtype), describe_sizes(chunk.sizes), " of ", key);
  return stored;
}

DcpReader::DcpReader(std::string folder, CheckpointFormat format, DcpMetadata metadata)
    : CheckpointReader(std::move(folder)), format_(format), metadata_(std::move(metadata)) {
  for (size_t i = 0; i < metadata_.entries.size(); ++i) {
    const auto& entry = metadata_.entries[i];
    index_.emplace(entry.key, i);
    auto info = entry.tensor_info();
    if (!info || is_in_value(entry)) add_value({entry.key, entry.path});
    if (info) add_tensor(*std::move(info));
  }
}

const DcpEntry& DcpReader::entry_at(const std::string& key) const {
  const auto found = index_.find(key);
  TORCH_CHECK_VALUE(found != index_.end(), path(), " has no key ", key);
  return metadata_.entries[found->second];
}

std::vector<StoredChunk> DcpReader::chunks(const std::string& key) const {
  const auto& entry = entry_at(key);
  std::vector<StoredChunk> chunks;
  if (const auto* tensor = entry.tensor()) {
    for (const auto& chunk : tensor->chunks)
      chunks.push_back({chunk.offsets, chunk.sizes, chunk.location.file, chunk.location.range});
    return chunks;
  }
  for (const auto& [file, range] : entry.locations()) chunks.push_back({.file = file, .range = range});
  return chunks;
}

void DcpReader::check_chunks(const std::string& key, const DcpTensor& tensor) {
  if (checked_.count(key) != 0) return;
  try {
    check_tiling(key, tensor);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path(), "/.metadata: ", error.what_without_backtrace(), ": the checkpoint is damaged");
  }
  checked_.insert(key);
}

const InputFile& DcpReader::open(const DcpLocation& location, const std::string& key) {
  TORCH_CHECK(!location.file.empty(), path(), "/.metadata does not say where ", key, " is stored");
  auto found = files_.find(location.file);
  if (found == files_.end()) found = files_.emplace(location.file, InputFile(path() + "/" + location.file)).first;
  return found->second;
}

void DcpReader::read_chunk(const std::string& key, const DcpTensor& tensor, const DcpChunk& chunk,
                           const ShardedTensor& into, ReadQueue& reads) {
  const auto box = intersect(chunk, into);
  if (box.numel == 0) return;
  const auto& file = open(chunk.location, key);
  const auto stored = find_stored_chunk(file, key, tensor, chunk);
  auto target = narrow_to(into.local.detach(), box.in_local, box.sizes, 0);
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(stored.dtype));
  const auto rows = box.sizes.empty() ? 1 : box.sizes[0];
  const auto first_row = box.sizes.empty() ? 0 : box.in_chunk[0];
  const auto row_elements =
      box.sizes.empty() ? 1 : *checked_numel({stored.sizes.begin() + 1, stored.sizes.end()}, element_bytes);
  const auto row_bytes = row_elements * element_bytes;
  if (can_read_into(target, stored, box)) {
    reads.add(file, target.data_ptr(), rows * row_bytes, stored.data_offset + first_row * row_bytes);
    return;
  }
  const auto step = std::max<int64_t>(1, kBytesAtOnce / row_bytes);
  for (int64_t row = 0; row < rows; row += step) {
    const auto count = std::min(step, rows - row);
    const auto part = narrow_to(megashard::read_rows(file, stored, first_row + row, count), box.in_chunk, box.sizes, 1);
    auto place = box.sizes.empty() ? target : target.narrow(0, row, count);
    place.copy_(part);
  }
}

void DcpReader::read_into(const std::string& key, const ShardedTensor& into, ReadQueue& reads) {
  const at::NoGradGuard no_grad;
  const auto& entry = entry_at(key);
  const auto* tensor = entry.tensor();
  if (tensor == nullptr) {
    into.local.detach().fill_(read_number(entry, into));
    return;
  }
  check_fit(key, into);
  for (const auto& chunk : tensor->chunks) read_chunk(key, *tensor, chunk, into, reads);
}

double DcpReader::read_number(const DcpEntry& entry, const ShardedTensor& into) {
  TORCH_CHECK_VALUE(into.local.numel() == 1, entry.key, " is a plain value in ", path(), ", not a tensor");
  return read_plain_value(entry).as_double();
}

void DcpReader::check_fit(const std::string& key, const ShardedTensor& into) {
  const auto& entry = entry_at(key);
  const auto* tensor = entry.tensor();
  if (tensor == nullptr) {
    read_number(entry, into);
    return;
  }
  CheckpointReader::check_fit(key, into);
  check_chunks(key, *tensor);
}

at::Tensor DcpReader::read_rows(const std::string& key, int64_t begin, int64_t count) {
  const auto& entry = entry_at(key);
  const auto info = entry.tensor_info();
  TORCH_CHECK_VALUE(info, key, " is a plain value in ", path(), ", not a tensor");
  auto sizes = info->sizes;
  const auto rows_there = sizes.empty() ? 1 : sizes[0];
  TORCH_CHECK_VALUE(begin >= 0 && count >= 0 && count <= rows_there - begin, key, " has ", rows_there, " rows, not ",
                    begin, " to ", begin + count);
  if (const auto* tensor = entry.tensor()) {
    int64_t stored_bytes = 0;  // checked before memory is allocated: sizes may be wrong
    for (const auto& chunk : tensor->chunks)
      stored_bytes += std::min(chunk.location.range.length, open(chunk.location, key).size());
    const auto bytes = tensor_bytes(*info);
    TORCH_CHECK(stored_bytes >= bytes, key, " should have ", bytes, " bytes, and ", path(), " stores ", stored_bytes,
                " for it: the checkpoint is damaged");
  }
  if (!sizes.empty()) sizes[0] = count;
  auto rows = ShardedTensor::replicated(at::empty(sizes, at::TensorOptions(info->dtype)));
  rows.global_sizes = info->sizes;
  if (!sizes.empty()) rows.offsets[0] = begin;
  ReadQueue reads;
  read_into(key, rows, reads);
  reads.run();
  return rows.local;
}

Value DcpReader::read_value(const std::string& key) {
  const auto& entry = entry_at(key);
  TORCH_CHECK_VALUE(is_value(key), key, " is a tensor in ", path(), ", not a plain value");
  return entry.tensor_info() ? tensor_value(read_tensor(key)) : read_plain_value(entry);
}

Value DcpReader::read_plain_value(const DcpEntry& entry) {
  if (const auto* known = std::get_if<DcpKnownValue>(&entry.stored)) return known->value;
  if (const auto* step = std::get_if<DcpCommonStep>(&entry.stored)) return step->value;
  const auto& bytes = std::get<DcpBytes>(entry.stored);
  auto stored = read_stored_value(open(bytes.location, entry.key), bytes.location.range);
  if (!bytes.is_sharded_object) return stored;
  TORCH_CHECK(stored.as_items().size() == 1, entry.key, " in ", path(), " is ", stored.as_items().size(),
              " objects instead of one");
  return stored.as_items()[0];
}

CheckedBytes DcpReader::verify(const FaultSink& fault) { return verify_dcp(path(), entries(), fault); }

}  // namespace megashard
