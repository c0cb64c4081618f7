#include "models/moe/stacked_experts.h"

#include <ATen/ops/cat.h>

#include <charconv>
#include <utility>

#include "parallel/collectives/process_group.h"

namespace megashard {
namespace {

constexpr const char* kList = ".experts.";

/// True if a layer's two tensors are stored [in, out]: only one of both forms fits both sizes.
bool is_transposed(at::IntArrayRef gate_up, at::IntArrayRef down) {
  return gate_up.size() == 3 && down.size() == 3 && gate_up[1] == down[2] && gate_up[2] == 2 * down[1];
}

ShardedTensor whole_piece(at::Tensor local, std::vector<int64_t> sizes, int64_t expert) {
  return {.local = std::move(local),
          .global_sizes = std::move(sizes),
          .offsets = {expert, 0, 0},
          .mesh = nullptr,
          .placements = {}};
}

}  // namespace

std::optional<StackedWeight> StackedWeight::of(const std::string& name) {
  const auto list = name.find(kList);
  if (list == name.npos) return std::nullopt;
  StackedWeight weight{.experts = name.substr(0, list + std::string(kList).size() - 1)};
  const char* end = name.data() + name.size();
  const auto number = std::from_chars(name.data() + weight.experts.size() + 1, end, weight.expert);
  const std::string rest(number.ptr, end);
  if (number.ec != std::errc()) return std::nullopt;
  if (rest == ".up_proj.weight") weight.part = Part::kUp;
  if (rest == ".down_proj.weight") weight.part = Part::kDown;
  if (weight.part == Part::kGate && rest != ".gate_proj.weight") return std::nullopt;
  return weight;
}

std::optional<int64_t> expert_of(const std::string& key) {
  const auto list = key.find(kList);
  if (list == key.npos) return std::nullopt;
  int64_t expert = 0;
  const char* const first = key.data() + list + std::string(kList).size();
  const auto number = std::from_chars(first, key.data() + key.size(), expert);
  return number.ec == std::errc() ? std::optional(expert) : std::nullopt;
}

std::string StackedWeight::source() const { return experts + (part == Part::kDown ? ".down_proj" : ".gate_up_proj"); }

std::string StackedWeight::other_source() const {
  return experts + (part == Part::kDown ? ".gate_up_proj" : ".down_proj");
}

at::Tensor StackedWeight::view(CheckpointReader& files) const {
  const auto* other = files.find(other_source());
  return other == nullptr ? at::Tensor() : view(files.read_tensor(source()), other->sizes);
}

at::Tensor StackedWeight::view(const at::Tensor& whole, at::IntArrayRef other_sizes) const {
  if (whole.dim() != 3 || expert >= whole.size(0)) return {};
  auto weight = whole.select(0, expert);
  const bool transposed =
      part == Part::kDown ? is_transposed(other_sizes, whole.sizes()) : is_transposed(whole.sizes(), other_sizes);
  if (transposed) weight = weight.t();
  if (part == Part::kDown) return weight;
  const int64_t rows = weight.size(0) / 2;
  return weight.narrow(0, part == Part::kUp ? rows : 0, rows);
}

bool stacks_transposed(int64_t hidden_size, int64_t intermediate_size) {
  return hidden_size != 2 * intermediate_size && hidden_size != intermediate_size;
}

ShardedTensors stack_experts(const ShardedTensors& tensors, int64_t num_experts) {
  ShardedTensors stacked;
  for (const auto& [name, tensor] : tensors) {
    const auto weight = StackedWeight::of(name);
    if (!weight) {
      stacked.emplace_back(name, tensor);
      continue;
    }
    if (tensor.local.numel() == 0) continue;  // it would begin where another's rows do
    const bool halves = weight->part != StackedWeight::Part::kDown;
    const int64_t rows = tensor.global_sizes[0];
    const int64_t begin = weight->part == StackedWeight::Part::kUp ? rows : 0;
    stacked.emplace_back(weight->source(),
                         ShardedTensor{.local = tensor.local.unsqueeze(0),
                                       .global_sizes = {num_experts, halves ? 2 * rows : rows, tensor.global_sizes[1]},
                                       .offsets = {weight->expert, begin + tensor.offsets[0], tensor.offsets[1]},
                                       .mesh = tensor.mesh,
                                       .placements = tensor.placements});
  }
  return stacked;
}

ShardedTensors stack_experts_transposed(const ShardedTensors& tensors, int64_t num_experts) {
  ShardedTensors stacked;
  at::Tensor gate;  // of the expert whose up projection comes next
  for (const auto& [name, tensor] : tensors) {
    const auto weight = StackedWeight::of(name);
    if (!weight) {
      stacked.emplace_back(name, tensor);
      continue;
    }
    const auto groups = sharding_groups(tensor);
    const bool mine = groups.empty() || groups[0]->rank() == weight->expert % groups[0]->size();
    auto whole = full_tensor(tensor);
    if (!mine) continue;
    whole = whole.t().cpu();
    if (weight->part == StackedWeight::Part::kGate) {
      gate = whole;
      continue;
    }
    if (weight->part == StackedWeight::Part::kUp) whole = at::cat({std::exchange(gate, {}), whole}, 1);
    stacked.emplace_back(weight->source(), whole_piece(whole.contiguous().unsqueeze(0),
                                                       {num_experts, whole.size(0), whole.size(1)}, weight->expert));
  }
  return stacked;
}

}  // namespace megashard
