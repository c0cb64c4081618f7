#include "checkpoint/convert/folder_writer.h"

#include <c10/util/Exception.h>

#include <map>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_paths.h"

namespace megashard {

FolderWriter::FolderWriter(std::string folder, CheckpointFormat format, const std::vector<TensorInfo>& tensors)
    : folder_(std::move(folder)), format_(format) {
  std::vector<TensorInfo> announced;
  for (const auto& info : tensors) {
    if (format_ == CheckpointFormat::kTorchDist && is_optimizer_step(info.name)) {
      ++announced_steps_;
    } else {
      announced.push_back(info);
    }
  }
  announce(announced);
  file_ = std::make_unique<OutputFile>(folder_ + "/" + file_name());
}

void FolderWriter::announce(const std::vector<TensorInfo>& tensors) {
  std::vector<TorchDistPlace> dist;
  if (format_ == CheckpointFormat::kTorchDist) dist = torch_dist_places(tensors);
  std::unordered_map<std::string, size_t> entries;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& info = tensors[i];
    const auto place = dist.empty() ? TorchDistPlace{info.name, {}, 0} : dist[i];
    auto sizes = info.sizes;
    DcpChunk chunk{.offsets = std::vector<int64_t>(sizes.size(), 0), .sizes = sizes};
    if (place.layer) {
      sizes.insert(sizes.begin(), place.layers);
      chunk.sizes.insert(chunk.sizes.begin(), 1);
      chunk.offsets.insert(chunk.offsets.begin(), *place.layer);
    }
    const auto [entry, is_new] = entries.try_emplace(place.key, metadata_.entries.size());
    if (is_new) {
      metadata_.entries.push_back(
          {.key = place.key, .path = tensor_path(place.key), .stored = DcpTensor{.dtype = info.dtype, .sizes = sizes}});
    }
    auto& chunks = metadata_.entries[entry->second].tensor()->chunks;
    chunks.push_back(std::move(chunk));
    const Place there{entry->second, chunks.size() - 1, place.layer.has_value(), false};
    const bool is_first = places_.emplace(info.name, there).second;
    TORCH_CHECK_VALUE(is_first && (is_new || place.layer), "two tensors would both have the key ", place.key);
  }
}

std::string FolderWriter::file_name() const { return data_file_name(files_); }

void FolderWriter::write(const std::string& key, const at::Tensor& whole) {
  if (format_ == CheckpointFormat::kTorchDist && is_optimizer_step(key)) {
    steps_.emplace_back(key, ShardedTensor::replicated(whole.clone()));
    return;
  }
  const auto found = places_.find(key);
  TORCH_CHECK_VALUE(found != places_.end() && !found->second.written, key,
                    found == places_.end() ? " was not announced" : " was written already");
  auto& place = found->second;
  auto& tensor = *metadata_.entries[place.entry].tensor();
  auto& chunk = tensor.chunks[place.chunk];
  const auto announced = at::IntArrayRef(chunk.sizes).slice(place.stacked ? 1 : 0);
  TORCH_CHECK_VALUE(whole.scalar_type() == tensor.dtype && whole.sizes() == announced, key, " is ", whole.scalar_type(),
                    describe_sizes(whole.sizes().vec()), ", announced as ", tensor.dtype,
                    describe_sizes(announced.vec()));
  const auto stored = write_stored_tensor(*file_, place.stacked ? whole.unsqueeze(0) : whole);
  chunk.location = {file_name(), stored};
  place.written = true;
}

void FolderWriter::write_object(const std::string& key, const Value& object) {
  add_value_entry(key, {key}, List{{object}});
}

void FolderWriter::add_value_entry(const std::string& key, std::vector<Value> path, const Value& value) {
  const auto range = write_stored_value(*file_, value);
  metadata_.entries.push_back(
      {.key = key, .path = std::move(path), .stored = DcpBytes{.location = {file_name(), range}}});
}

void FolderWriter::next_file() {
  written_.push_back(file_->sync_and_close());
  ++files_;
  file_ = std::make_unique<OutputFile>(folder_ + "/" + file_name());
}

/// Writes steps that differ as tensors, like the other buffers.
void FolderWriter::write_steps(const ShardedTensors& steps) {
  std::map<std::string, DcpTensor> tensors;
  for (const auto& [key, step] : steps) {
    auto& tensor = tensors[key];
    tensor.dtype = step.local.scalar_type();
    tensor.sizes = step.global_sizes;
    const auto range = write_stored_tensor(*file_, step.local);
    tensor.chunks.push_back({step.offsets, step.local.sizes().vec(), {file_name(), range}});
  }
  for (auto& [key, tensor] : tensors)
    metadata_.entries.push_back({.key = key, .path = {key}, .stored = std::move(tensor)});
}

void FolderWriter::write_values(const Dict& values) {
  std::vector<FlatValue> flat;
  if (format_ == CheckpointFormat::kTorchDist) {
    const auto* ranks = values.find(kRngStateKey);
    const auto* by_rank = ranks == nullptr ? nullptr : ranks->get_if<Dict>();
    const auto world = by_rank == nullptr ? 0 : by_rank->entries.size();
    auto state = to_torch_dist(steps_, values, static_cast<int>(world));
    write_steps(state.tensors);
    written_.push_back(write_torch_dist_common(folder_, state.common));
    flat = std::move(state.objects);
  } else {
    flat = flatten_values(values);
  }
  for (auto& leaf : flat) add_value_entry(leaf.key, std::move(leaf.path), leaf.value);
}

std::vector<WrittenFile> FolderWriter::finish(const Dict& values) {
  for (const auto& [key, place] : places_) TORCH_CHECK_VALUE(place.written, key, " has not been written");
  TORCH_CHECK_VALUE(steps_.size() == announced_steps_, steps_.size(), " of ", announced_steps_,
                    " optimizer steps have been written");
  write_values(values);
  written_.push_back(file_->sync_and_close());
  written_.push_back(write_dcp_metadata(folder_, metadata_));
  if (format_ == CheckpointFormat::kTorchDist) written_.push_back(write_torch_dist_config(folder_));
  return written_;
}

}  // namespace megashard
