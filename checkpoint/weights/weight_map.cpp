#include "checkpoint/weights/weight_map.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>

#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

using Sizes = std::vector<int64_t>;

/// A box of a tensor and its numbers.
struct Box {
  at::Tensor data;
  Sizes offsets;
};

/// The part of the shard that lies in a box of its tensor; undefined data if there is none.
Box intersection(const WeightPart& part, const ShardedTensor& shard) {
  TORCH_INTERNAL_ASSERT(part.sizes.size() == shard.global_sizes.size(), part.tensor);
  Sizes offsets, in_shard, sizes;
  for (size_t i = 0; i < part.sizes.size(); ++i) {
    const int64_t shard_end = shard.offsets[i] + shard.local.size(static_cast<int64_t>(i));
    const int64_t begin = std::max(part.offsets[i], shard.offsets[i]);
    const int64_t end = std::min(part.offsets[i] + part.sizes[i], shard_end);
    if (begin >= end) return {};
    offsets.push_back(begin);
    in_shard.push_back(begin - shard.offsets[i]);
    sizes.push_back(end - begin);
  }
  return {narrowed(shard.local.detach(), in_shard, sizes), std::move(offsets)};
}

at::Tensor in_model_dimensions(const WeightPart& part, at::Tensor stored) {
  if (!part.view.empty()) stored = stored.view(part.view);
  return part.permutation.empty() ? stored : stored.permute(part.permutation);
}

int64_t stored_offset(const WeightPart& part, size_t dim) {
  return part.stored_offsets.empty() ? 0 : part.stored_offsets[dim];
}

/// From the model's dimensions back to those of `view`. Offsets are those in the stored tensor.
Box unpermuted(const WeightPart& part, Box box) {
  for (size_t i = 0; i < box.offsets.size(); ++i) box.offsets[i] += stored_offset(part, i) - part.offsets[i];
  if (part.permutation.empty()) return box;
  Sizes back(part.permutation.size()), offsets(back.size());
  for (size_t i = 0; i < back.size(); ++i) {
    const auto from = static_cast<size_t>(part.permutation[i]);
    back[from] = static_cast<int64_t>(i);
    offsets[from] = box.offsets[i];
  }
  return {box.data.permute(back), std::move(offsets)};
}

/// Joins dimensions of `view` to those of the stored tensor. Calls `visit` for each of the boxes that this makes.
class DimensionJoiner {
 public:
  DimensionJoiner(const WeightPart& part, std::function<void(Box)> visit) : part_(part), visit_(std::move(visit)) {
    size_t end = 0;
    for (const int64_t size : part.stored_sizes) {
      const size_t begin = end;
      int64_t joined = 1;
      while (end < part.view.size() && (joined < size || end == begin)) joined *= part.view[end++];
      runs_.emplace_back(begin, end);
      TORCH_INTERNAL_ASSERT(joined == size, part.stored);
    }
    if (!runs_.empty()) runs_.back().second = part.view.size();
  }

  void join(const Box& box) const {
    for (const auto& [begin, end] : runs_) {
      const auto split = split_dimension(box, begin, end);
      if (split == end) continue;
      const auto dim = static_cast<int64_t>(split);
      for (int64_t i = 0; i < box.data.size(dim); ++i) {
        auto offsets = box.offsets;
        offsets[split] += i;
        join({box.data.narrow(dim, i, 1), std::move(offsets)});
      }
      return;
    }
    Box joined;
    Sizes sizes;
    for (const auto& [begin, end] : runs_) {
      int64_t size = 1, offset = 0;
      for (size_t i = begin; i < end; ++i) {
        size *= box.data.size(static_cast<int64_t>(i));
        offset = offset * part_.view[i] + box.offsets[i];
      }
      sizes.push_back(size);
      joined.offsets.push_back(offset);
    }
    joined.data = box.data.view(sizes);
    visit_(std::move(joined));
  }

 private:
  /// First dimension of the run whose slices must be visited one by one; `end` if the run is one interval in one view.
  size_t split_dimension(const Box& box, size_t begin, size_t end) const {
    size_t first = begin;
    while (first < end && box.data.size(static_cast<int64_t>(first)) == 1) ++first;
    for (size_t i = first + 1; i < end; ++i) {
      const auto dim = static_cast<int64_t>(i);
      const bool is_whole = box.data.size(dim) == part_.view[i];
      if (!is_whole || box.data.stride(dim - 1) != box.data.stride(dim) * part_.view[i]) return first;
    }
    return end;
  }

  const WeightPart& part_;
  std::function<void(Box)> visit_;
  std::vector<std::pair<size_t, size_t>> runs_;  // range of dimensions of `view` for each stored dimension
};

ShardedTensor piece_of(const WeightPart& part, Box box, const ShardedTensor& shard) {
  return {.local = std::move(box.data),
          .global_sizes = part.stored_sizes,
          .offsets = std::move(box.offsets),
          .mesh = shard.mesh,
          .placements = shard.placements};
}

Box empty_box(const WeightPart& part, const at::Tensor& like) {
  auto sizes = part.stored_sizes;
  if (!sizes.empty()) sizes[0] = 0;
  return {at::empty(sizes, like.options().requires_grad(false)), Sizes(sizes.size(), 0)};
}

/// Position of `part` in the name, at its begin or after a dot; npos if there is none.
size_t find_part(const std::string& name, const std::string& part) {
  for (auto at = name.find(part); at != std::string::npos; at = name.find(part, at + 1)) {
    if (at == 0 || name[at - 1] == '.') return at;
  }
  return std::string::npos;
}

/// True if the name has the spelling of files whose part ends in the model's: "language_model.lm_head." in "lm_head.".
bool is_published(const std::string& name, const WeightRenaming& renaming) {
  const auto& [model, files] = renaming;
  return files != model && files.ends_with(model) && find_part(name, files) != name.npos;
}

}  // namespace

WeightPart whole_part(std::string tensor, std::string stored, Sizes stored_sizes, Sizes view, Sizes permutation) {
  WeightPart part{.tensor = std::move(tensor),
                  .offsets = {},
                  .sizes = view.empty() ? stored_sizes : view,
                  .stored = std::move(stored),
                  .stored_sizes = std::move(stored_sizes)};
  if (!permutation.empty()) {
    const auto before = part.sizes;
    for (size_t i = 0; i < permutation.size(); ++i) part.sizes[i] = before[static_cast<size_t>(permutation[i])];
  }
  part.offsets.assign(part.sizes.size(), 0);
  part.view = std::move(view);
  part.permutation = std::move(permutation);
  return part;
}

WeightPart indexed_part(std::string tensor, const Sizes& index, std::string stored, Sizes stored_sizes) {
  Sizes view(index.size(), 1);
  view.insert(view.end(), stored_sizes.begin(), stored_sizes.end());
  auto part = whole_part(std::move(tensor), std::move(stored), std::move(stored_sizes), std::move(view));
  std::ranges::copy(index, part.offsets.begin());
  return part;
}

WeightPart rows_part(std::string tensor, int64_t first, int64_t rows, std::string stored, Sizes stored_sizes,
                     int64_t stored_first) {
  auto part = whole_part(std::move(tensor), std::move(stored), std::move(stored_sizes));
  part.offsets[0] = first;
  part.sizes[0] = rows;
  part.stored_offsets.assign(part.sizes.size(), 0);
  part.stored_offsets[0] = stored_first;
  return part;
}

bool is_stored_with(const WeightPart& part, Sizes sizes) {
  if (part.padded && !sizes.empty()) sizes[0] = std::min(sizes[0], least_sizes(part)[0]);
  return sizes == least_sizes(part);
}

Sizes least_sizes(const WeightPart& part) {
  auto sizes = part.stored_sizes;
  if (part.padded) sizes[0] = stored_offset(part, 0) + part.sizes[0];
  return sizes;
}

const StoredForm* fitting_form(const WeightGroup& group, const StoredSizes& sizes) {
  const auto fits = [&](const WeightPart& part) {
    const auto* stored = sizes(part.stored);
    return stored != nullptr && is_stored_with(part, *stored);
  };
  const auto found =
      std::ranges::find_if(group.forms, [&](const StoredForm& form) { return std::ranges::all_of(form.parts, fits); });
  return found == group.forms.end() ? nullptr : &*found;
}

std::string WeightMap::published_name(const std::string& name) const {
  for (const auto& each : renamings) {
    const auto at = find_part(name, each.model);
    if (at == name.npos) continue;
    if (is_published(name, each)) return name;
    return name.substr(0, at) + each.files + name.substr(at + each.model.size());
  }
  return name;
}

bool WeightMap::leaves_out(const std::string& published) const {
  return std::ranges::any_of(left_out, [&](const std::string& each) { return published.starts_with(each); });
}

std::string WeightMap::model_name(const std::string& published) const {
  for (const auto& each : renamings) {
    if (find_part(published, each.model) != published.npos && !is_published(published, each)) return published;
  }
  for (const auto& each : renamings) {
    const auto at = find_part(published, each.files);
    if (at != published.npos) return published.substr(0, at) + each.model + published.substr(at + each.files.size());
  }
  return published;
}

const WeightGroup* WeightMap::group_of(const std::string& tensor) const {
  for (const auto& group : groups) {
    if (std::ranges::count(group.tensors, tensor, &WeightGroup::Member::name) != 0) return &group;
  }
  return nullptr;
}

at::Tensor box_of(const WeightPart& part, const at::Tensor& stored) {
  const auto whole = in_model_dimensions(part, stored);
  return part.stored_offsets.empty() ? narrowed(whole, Sizes(part.sizes.size()), part.sizes)
                                     : narrowed(whole, part.stored_offsets, part.sizes);
}

void read_part(const WeightPart& part, const at::Tensor& stored, const ShardedTensor& into) {
  const at::NoGradGuard no_grad;
  const auto both = intersection(part, into);
  if (!both.data.defined()) return;
  auto offsets = both.offsets;
  for (size_t i = 0; i < offsets.size(); ++i) offsets[i] -= part.offsets[i];
  both.data.copy_(narrowed(box_of(part, stored), offsets, both.data.sizes()));
}

ShardedTensors stored_pieces(const StoredForm& form, const std::string& tensor, const ShardedTensor& shard,
                             EmptyPieces empty) {
  ShardedTensors pieces;
  for (const auto& part : form.parts) {
    if (part.tensor != tensor) continue;
    auto both = intersection(part, shard);
    if (!both.data.defined()) {
      if (empty == EmptyPieces::kKeep)
        pieces.emplace_back(part.stored, piece_of(part, empty_box(part, shard.local), shard));
      continue;
    }
    const auto add = [&](Box box) { pieces.emplace_back(part.stored, piece_of(part, std::move(box), shard)); };
    auto box = unpermuted(part, std::move(both));
    if (part.view.empty()) {
      add(std::move(box));
    } else {
      DimensionJoiner(part, add).join(box);
    }
  }
  return pieces;
}

std::vector<ShardedTensors> other_forms(const WeightMap& map, const std::string& key, const ShardedTensor& tensor) {
  const auto state = split_optimizer_state_key(key);
  if (!state && !is_model_key(key)) return {};
  const auto name = state ? state->weight : key.substr(kModelPrefix.size());
  const auto* group = map.group_of(name);
  if (group == nullptr) return {};
  const auto key_of = [&](const std::string& stored) {
    return state ? optimizer_state_key(stored, state->buffer) : model_key(stored);
  };
  const bool is_scalar = tensor.global_sizes.empty();  // an optimizer's step
  const auto member = std::ranges::find(group->tensors, name, &WeightGroup::Member::name);
  if (!is_scalar && tensor.global_sizes != member->sizes) return {};
  std::vector<ShardedTensors> forms;
  for (const auto& form : group->forms) {
    auto& pieces = forms.emplace_back();
    if (!is_scalar) pieces = stored_pieces(form, name, tensor, EmptyPieces::kKeep);
    for (const auto& part : form.parts) {
      if (!is_scalar || part.tensor != name) continue;
      pieces.emplace_back(part.stored, tensor);
      if (pieces.size() > 1) pieces.back().second.local = at::empty_like(tensor.local);  // one is as good as all
    }
    for (auto& [stored, piece] : pieces) stored = key_of(stored);
  }
  return forms;
}

std::vector<std::string> names_in_forms(const WeightMap& map) {
  std::vector<std::string> names;
  for (const auto& group : map.groups) {
    for (const auto& form : group.forms) {
      for (const auto& part : form.parts) names.push_back(part.stored);
    }
  }
  return names;
}

}  // namespace megashard
