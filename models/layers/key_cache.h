#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <utility>

namespace megashard {

/// Keys and values that the attention layers of a network keep between forwards, with room for `capacity` tokens a row.
class KeyCache {
 public:
  explicit KeyCache(int64_t capacity) : capacity_(capacity) {}

  /// A forward of `count` tokens a row begins. The first one has the places 0, 1, ...; `places` [B, count] int64: those
  /// of a later one. A place beyond a row's tokens may be taken again.
  void begin(int64_t count, const at::Tensor& places);
  bool is_first() const { return !places_.defined(); }
  const at::Tensor& places() const { return places_; }  ///< of a later forward

  /// Keeps keys and values [B, count, G, D] of the forward's tokens for `layer`. Returns those of all places that a row
  /// may have, [B, places, G, D].
  std::pair<at::Tensor, at::Tensor> add(const void* layer, const at::Tensor& keys, const at::Tensor& values);

 private:
  struct Kept {
    at::Tensor keys, values;  // [B, capacity, G, D]
  };

  int64_t capacity_;
  int64_t used_ = 0;  // number of places of the longest row
  at::Tensor places_, rows_;
  std::unordered_map<const void*, Kept> layers_;
};

}  // namespace megashard
