#include "models/layers/key_cache.h"

#include <ATen/TensorIndexing.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace megashard {

void KeyCache::begin(int64_t count, const at::Tensor& places) {
  if (used_ > 0) {
    TORCH_CHECK(places.defined() && places.dim() == 2 && places.size(1) == count,
                "a forward that continues needs the positions of its tokens, [rows, ", count, "]");
    places_ = places;
    rows_ = at::arange(places.size(0), places.options()).unsqueeze(1);
  }
  used_ += count;
  TORCH_CHECK(used_ <= capacity_, "the cache has room for ", capacity_, " tokens of a row, not for ", used_);
}

std::pair<at::Tensor, at::Tensor> KeyCache::add(const void* layer, const at::Tensor& keys, const at::Tensor& values) {
  Kept& kept = layers_[layer];
  if (is_first()) {
    // Zeros: a weight of 0 would not hide what is no number.
    const auto room = [this](const at::Tensor& like) {
      const auto whole = at::zeros({like.size(0), capacity_, like.size(2), like.size(3)}, like.options());
      whole.narrow(1, 0, used_).copy_(like);
      return whole;
    };
    kept = {room(keys), room(values)};
    return {keys, values};
  }
  const auto with = [this](at::Tensor& whole, const at::Tensor& added) {
    whole.index_put_({rows_, places_}, added);
    return whole.narrow(1, 0, used_);
  };
  return {with(kept.keys, keys), with(kept.values, values)};
}

}  // namespace megashard
