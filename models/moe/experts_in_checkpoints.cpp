#include "models/moe/experts_in_checkpoints.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <string_view>

namespace megashard {
namespace {

/// "<list>.experts." <projection> <rest>
struct ExpertKey {
  std::string list;
  std::string projection;
  std::string rest;

  static std::optional<ExpertKey> of(const std::string& key) {
    constexpr std::string_view kExperts = ".experts.";
    const auto found = key.find(kExperts);
    if (found == key.npos) return std::nullopt;
    const auto begin = found + kExperts.size();
    const auto end = std::min(key.find('.', begin), key.size());
    ExpertKey parts{key.substr(0, begin), key.substr(begin, end - begin), key.substr(end)};
    const auto& name = parts.projection;
    const bool is_known = name == "gate_up_proj" || name == "gate_proj" || name == "up_proj" || name == "down_proj";
    return is_known ? std::optional(std::move(parts)) : std::nullopt;
  }

  bool has_halves() const { return projection == "gate_up_proj"; }
  /// Names of its linear layers in each expert.
  std::vector<std::string> layers() const {
    return has_halves() ? std::vector<std::string>{"gate_proj", "up_proj"} : std::vector{projection};
  }
};

ShardedTensor part_of(const ShardedTensor& tensor, at::Tensor local, std::vector<int64_t> sizes,
                      std::vector<int64_t> offsets) {
  return {std::move(local), std::move(sizes), std::move(offsets), tensor.mesh, tensor.placements};
}

/// The matrix of one expert, [rows, columns]: this rank's part of it, or none of its rows.
ShardedTensor matrix_of(const ShardedTensor& tensor, int64_t expert, std::optional<int64_t> half) {
  const size_t leading = half ? 2 : 1;
  const auto& sizes = tensor.global_sizes;
  const std::vector<int64_t> matrix{sizes[leading], sizes[leading + 1]};
  auto local = tensor.local;
  std::vector<int64_t> index{expert};
  if (half) index.push_back(*half);
  for (size_t dim = 0; dim < leading; ++dim) {
    const int64_t own = index[dim] - tensor.offsets[dim];
    if (own < 0 || own >= local.size(0) || tensor.local.numel() == 0)
      return part_of(tensor, at::empty({0, matrix[1]}, local.options().requires_grad(false)), matrix, {matrix[0], 0});
    local = local.select(0, own);
  }
  return part_of(tensor, local, matrix, {tensor.offsets[leading], tensor.offsets[leading + 1]});
}

ShardedTensors one_by_one(const ExpertKey& key, const ShardedTensor& tensor, int64_t num_experts) {
  const bool is_weight = key.rest.find(".lora_") == key.rest.npos;
  ShardedTensors all;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    int64_t half = 0;
    for (const auto& layer : key.layers()) {
      const auto name = key.list + std::to_string(expert) + "." + layer + (is_weight ? ".weight" : "") + key.rest;
      if (tensor.global_sizes.empty()) {  // an optimizer's step, of which one is as good as all
        auto value = tensor;
        if (!all.empty()) value.local = at::empty_like(tensor.local);
        all.emplace_back(name, std::move(value));
      } else {
        all.emplace_back(name, matrix_of(tensor, expert, key.has_halves() ? std::optional(half++) : std::nullopt));
      }
    }
  }
  return all;
}

/// [E, 2, I, C] as [E, 2 I, C], half by half.
ShardedTensors packed(const std::string& key, const ShardedTensor& tensor) {
  const auto& sizes = tensor.global_sizes;
  const auto& begin = tensor.offsets;
  ShardedTensors halves;
  for (int64_t i = 0; i < tensor.local.size(1); ++i)
    halves.emplace_back(key, part_of(tensor, tensor.local.select(1, i), {sizes[0], 2 * sizes[2], sizes[3]},
                                     {begin[0], (begin[1] + i) * sizes[2] + begin[2], begin[3]}));
  return halves;
}

}  // namespace

bool is_of_experts(const std::string& name) { return ExpertKey::of(name).has_value(); }

std::vector<ShardedTensors> checkpoint_forms(const std::string& key, const ShardedTensor& tensor, int64_t num_experts) {
  const auto parts = ExpertKey::of(key);
  if (!parts) return {};
  std::vector<ShardedTensors> forms;
  if (parts->has_halves() && tensor.global_sizes.size() == 4) forms.push_back(packed(key, tensor));
  forms.push_back(one_by_one(*parts, tensor, num_experts));
  return forms;
}

}  // namespace megashard
