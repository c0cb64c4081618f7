#include "checkpoint/dcp/dcp_reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

constexpr int64_t kBytesAtOnce = 64 << 20;

/// A box that a chunk and a shard share, from the start of each.
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

/// Optimizers differ in whether `step` is a tensor or a number.
bool is_number(const DcpEntry& entry) { return !entry.is_tensor || entry.value.has_value(); }

/// The box is whole rows of the chunk, and `target` is plain memory for them.
bool can_read_into(const at::Tensor& target, const StoredTensor& stored, const Overlap& box) {
  return target.device().is_cpu() && target.is_contiguous() && target.scalar_type() == stored.dtype &&
         stored.is_contiguous() &&
         (box.sizes.empty() || std::equal(box.sizes.begin() + 1, box.sizes.end(), stored.sizes.begin() + 1));
}

}  // namespace

StoredTensor find_stored_chunk(const InputFile& file, const DcpEntry& entry, const DcpChunk& chunk) {
  auto stored = find_stored_tensor(file, chunk.location.range);
  for (int left = chunk.leading_ones; left > 0 && !stored.sizes.empty() && stored.sizes[0] == 1; --left) {
    stored.sizes.erase(stored.sizes.begin());
    stored.strides.erase(stored.strides.begin());
  }
  TORCH_CHECK(stored.dtype == entry.dtype && stored.sizes == chunk.sizes, file.path(), " at byte ",
              chunk.location.range.offset, ": found ", torch_dtype_name(stored.dtype), describe_sizes(stored.sizes),
              " instead of ", torch_dtype_name(entry.dtype), describe_sizes(chunk.sizes), " of ", entry.key);
  return stored;
}

bool is_in_value(const DcpEntry& entry) {
  if (!entry.is_tensor || entry.path.empty()) return false;
  if (is_model_key(entry.key) || entry.key.starts_with(kOptimizerStatePrefix)) return false;
  return entry.path[0] == Value(kRngStateKey) ||
         std::any_of(entry.path.begin(), entry.path.end(),
                     [](const Value& part) { return part.get_if<int64_t>() != nullptr; });
}

DcpReader::DcpReader(std::string folder, CheckpointFormat format, DcpMetadata metadata)
    : folder_(std::move(folder)), format_(format), metadata_(std::move(metadata)) {
  for (size_t i = 0; i < metadata_.entries.size(); ++i) index_.emplace(metadata_.entries[i].key, i);
}

const DcpEntry* DcpReader::find(const std::string& key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &metadata_.entries[found->second];
}

void DcpReader::check_chunks(const DcpEntry& entry) {
  if (checked_.count(entry.key) != 0) return;
  try {
    check_tiling(entry);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, folder_, "/.metadata: ", error.what_without_backtrace(), ": the checkpoint is damaged");
  }
  checked_.insert(entry.key);
}

const InputFile& DcpReader::open(const DcpLocation& location, const DcpEntry& entry) {
  TORCH_CHECK(!location.file.empty(), folder_, "/.metadata does not say where ", entry.key, " is stored");
  auto found = files_.find(location.file);
  if (found == files_.end()) {
    found = files_.emplace(location.file, InputFile(folder_ + "/" + location.file)).first;
  }
  return found->second;
}

void DcpReader::read_chunk(const DcpEntry& entry, const DcpChunk& chunk, const ShardedTensor& into, ReadQueue& reads) {
  const auto box = intersect(chunk, into);
  if (box.numel == 0) return;
  const auto& file = open(chunk.location, entry);
  const auto stored = find_stored_chunk(file, entry, chunk);
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

void DcpReader::read_tensor(const DcpEntry& entry, const ShardedTensor& into) {
  ReadQueue reads;
  read_tensor(entry, into, reads);
  reads.run();
}

void DcpReader::read_tensor(const DcpEntry& entry, const ShardedTensor& into, ReadQueue& reads) {
  const at::NoGradGuard no_grad;
  if (is_number(entry)) {
    into.local.detach().fill_(read_number(entry, into));
    return;
  }
  check_fit(entry, into);
  for (const auto& chunk : entry.chunks) read_chunk(entry, chunk, into, reads);
}

double DcpReader::read_number(const DcpEntry& entry, const ShardedTensor& into) {
  TORCH_CHECK(into.local.numel() == 1, entry.key, " is a plain value in ", folder_, ", not a tensor");
  return (entry.value ? *entry.value : read_value(entry)).as_double();
}

void DcpReader::check_fit(const DcpEntry& entry, const ShardedTensor& into) {
  if (is_number(entry)) {
    read_number(entry, into);
    return;
  }
  TORCH_CHECK(entry.sizes == into.global_sizes, entry.key, " has sizes ", describe_sizes(entry.sizes), " in ", folder_,
              ", and ", describe_sizes(into.global_sizes),
              " here: another model was saved; give the flags of the run that wrote it");
  check_chunks(entry);
}

at::Tensor DcpReader::read_tensor(const DcpEntry& entry) {
  return read_rows(entry, 0, entry.sizes.empty() ? 1 : entry.sizes[0]);
}

at::Tensor DcpReader::read_rows(const DcpEntry& entry, int64_t begin, int64_t count) {
  TORCH_CHECK(entry.is_tensor, entry.key, " is a plain value in ", folder_, ", not a tensor");
  const auto rows_there = entry.sizes.empty() ? 1 : entry.sizes[0];
  TORCH_CHECK(begin >= 0 && count >= 0 && count <= rows_there - begin, entry.key, " has ", rows_there, " rows, not ",
              begin, " to ", begin + count);
  int64_t stored_bytes = 0;  // before memory is asked for: sizes alone prove nothing
  for (const auto& chunk : entry.chunks)
    stored_bytes += std::min(chunk.location.range.length, open(chunk.location, entry).size());
  const auto bytes = tensor_bytes({entry.key, entry.dtype, entry.sizes});
  TORCH_CHECK(entry.value || stored_bytes >= bytes, entry.key, " should have ", bytes, " bytes, and ", folder_,
              " stores ", stored_bytes, " for it: the checkpoint is damaged");
  auto sizes = entry.sizes;
  if (!sizes.empty()) sizes[0] = count;
  auto rows = ShardedTensor::replicated(at::empty(sizes, at::TensorOptions(entry.dtype)));
  rows.global_sizes = entry.sizes;
  if (!sizes.empty()) rows.offsets[0] = begin;
  read_tensor(entry, rows);
  return rows.local;
}

Value DcpReader::read_value(const DcpEntry& entry) {
  if (is_in_value(entry)) return tensor_value(read_tensor(entry));
  TORCH_CHECK(!entry.is_tensor, entry.key, " is a tensor in ", folder_, ", not a plain value");
  if (entry.value) return *entry.value;
  auto stored = read_stored_value(open(entry.location, entry), entry.location.range);
  if (!entry.is_sharded_object) return stored;
  TORCH_CHECK(stored.as_items().size() == 1, entry.key, " in ", folder_, " is ", stored.as_items().size(),
              " objects instead of one");
  return stored.as_items()[0];
}

}  // namespace megashard
