#include "checkpoint/publishing/published_steps.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "checkpoint/values/box_runs.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/device_mesh.h"

namespace megashard {
namespace {

constexpr const char* kPublishedPrefix = "step_";

std::string published_name(int64_t step) { return kPublishedPrefix + std::to_string(step); }

/// The number in "step_12"; nullopt for other names.
std::optional<int64_t> published_number(const std::string& name) {
  const std::string digits =
      name.starts_with(kPublishedPrefix) ? name.substr(std::string_view(kPublishedPrefix).size()) : "";
  int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (digits.empty() || error != std::errc() || *end != '\0' || published_name(step) != name) return std::nullopt;
  return step;
}

/// True on one of the ranks that hold this piece: the first in each dimension of the mesh that replicates it.
bool is_first_holder(const ShardedTensor& piece, const ProcessGroupPtr& group) {
  if (piece.is_replicated()) return rank_in(group) == 0;
  for (size_t dim = 0; dim < piece.placements.size(); ++dim) {
    const bool is_held_by_all = piece.placements[dim].kind == Placement::Kind::kReplicate;
    if (is_held_by_all && piece.mesh->coordinate(static_cast<int>(dim)) != 0) return false;
  }
  return true;
}

/// Calls visit() with the data of the piece as unsigned numbers of its width.
template <class Visit>
void with_bits(const at::Tensor& piece, const Visit& visit) {
  const void* data = piece.const_data_ptr();
  switch (piece.element_size()) {
    case 1:
      return visit(static_cast<const uint8_t*>(data));
    case 2:
      return visit(static_cast<const uint16_t*>(data));
    case 4:
      return visit(static_cast<const uint32_t*>(data));
    default:
      return visit(static_cast<const uint64_t*>(data));
  }
}

uint64_t checksum_of_piece(const ShardedTensor& piece) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  uint64_t sum = 0;
  with_bits(piece.local, [&](const auto* bits) {
    for_each_run(
        piece.global_sizes, piece.offsets, piece.local.sizes(), [&](int64_t whole, int64_t box, int64_t count) {
          for (int64_t i = 0; i < count; ++i)
            sum += (static_cast<uint64_t>(bits[box + i]) + 1) * ((static_cast<uint64_t>(whole + i) * kOdd) | 1);
        });
  });
  return sum;
}

/// checksums.json. Collective.
std::string checksums_of(const ShardedTensors& tensors, const ProcessGroupPtr& group) {
  const auto of_ranks = gather_or_throw(group, [&] {
    nlohmann::json own = nlohmann::json::object();
    for (const auto& [name, piece] : tensors) {
      if (is_first_holder(piece, group)) own[name] = checksum_of_piece(piece);
    }
    return own.dump();
  });
  std::map<std::string, uint64_t> sums;
  for (const std::string& of_rank : of_ranks) {
    const auto parsed = nlohmann::json::parse(of_rank);
    for (const auto& [name, sum] : parsed.items()) sums[name] += sum.get<uint64_t>();
  }
  nlohmann::ordered_json file = {{"checksum", "sum of (bits + 1) * (position * 0x9E3779B97F4A7C15 | 1), modulo 2^64"},
                                 {"tensors", sums}};
  return file.dump(1) + "\n";
}

/// Positions in the whole tensor, and the values there, of the elements whose bits differ.
struct Changes {
  std::vector<int64_t> positions;
  at::Tensor values;
};

Changes changes_of(const ShardedTensor& now, const ShardedTensor& before) {
  Changes changes;
  std::vector<int64_t> in_box;
  with_bits(now.local, [&](const auto* bits) {
    const auto* old = static_cast<decltype(bits)>(before.local.const_data_ptr());
    for_each_run(now.global_sizes, now.offsets, now.local.sizes(), [&](int64_t whole, int64_t box, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        if (bits[box + i] == old[box + i]) continue;
        changes.positions.push_back(whole + i);
        in_box.push_back(box + i);
      }
    });
  });
  if (in_box.empty()) return changes;
  const at::Tensor chosen = at::from_blob(in_box.data(), {std::ssize(in_box)}, at::kLong);
  changes.values = now.local.flatten().index_select(0, chosen);
  return changes;
}

}  // namespace

void PublishedSteps::write_changes(const std::string& into, const ShardedTensors& tensors,
                                   const ProcessGroupPtr& group) const {
  std::map<std::string, at::Tensor> data;
  std::vector<TensorInfo> infos;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    data[name] = tensor;
    infos.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, piece] = tensors[i];
    if (!is_first_holder(piece, group)) continue;
    Changes changes = changes_of(piece, last_[i].second);
    if (changes.positions.empty()) continue;
    const bool is_small = c10::multiply_integers(piece.global_sizes) <= std::numeric_limits<int32_t>::max();
    const at::Tensor positions =
        at::from_blob(changes.positions.data(), {std::ssize(changes.positions)}, at::kLong).clone();
    add(name + ".idx", is_small ? positions.to(at::kInt) : positions);
    add(name + ".val", changes.values);
  }
  char file[64];
  std::snprintf(file, sizeof file, "/delta-%05d-of-%05d.safetensors", rank_in(group) + 1, size_in(group));
  SafetensorsWriter writer(into + file, infos, {{"format", "pt"}, {"base_step", std::to_string(*last_step_)}});
  for (const TensorInfo& info : writer.tensors()) writer.write(data.at(info.name));
  writer.finish();
}

void PublishedSteps::write(int64_t step, const ShardedTensors& tensors, const ProcessGroupPtr& group,
                           const HfSaveOptions& files) {
  const bool is_first_rank = rank_in(group) == 0;
  const bool is_whole = last_.empty() || since_whole_ + 1 >= options_.full_interval;
  AtomicFolder folder(options_.folder + "/" + published_name(step));
  const std::string checksums = checksums_of(tensors, group);
  all_or_throw(group, [&] {
    if (is_first_rank) folder.begin();
  });
  try {
    if (is_whole) {
      save_hf_sharded(folder.hidden(), tensors, group, files);
    } else {
      all_or_throw(group, [&] { write_changes(folder.hidden(), tensors, group); });
    }
    all_or_throw(group, [&] {
      if (!is_first_rank) return;
      write_file_atomically(folder.hidden() + "/checksums.json", checksums);
      write_file_atomically(folder.hidden() + "/STABLE", "");
      folder.publish();
    });
  } catch (...) {
    if (is_first_rank) folder.abandon();
    throw;
  }
  // A reader may still be at the step before, which needs those back to its last whole one.
  if (is_first_rank && last_step_) remove_before(std::min(*last_step_, whole_step_));
  last_step_ = step;
  if (is_whole) whole_step_ = step;
  since_whole_ = is_whole ? 0 : since_whole_ + 1;
  if (options_.full_interval > 1) last_ = tensors;
}

void PublishedSteps::remove_before(int64_t step) const {
  for (const auto& entry : std::filesystem::directory_iterator(options_.folder)) {
    const auto other = published_number(entry.path().filename().string());
    const bool is_kept = !other || (options_.keep_interval && *other % *options_.keep_interval == 0);
    if (!is_kept && *other < step) remove_atomically(entry.path().string());
  }
}

}  // namespace megashard
