#include "parallel/sequence_parallel/ring_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

namespace megashard {
namespace {

/// Without masks: causality alone leaves one block. The chunks of `source` lie on both sides of those of `place`, or
/// between them.
RingBlock causal_block(int64_t place, int64_t source, int64_t rows) {
  const RowRange all{0, rows}, first{0, rows / 2}, second{rows / 2, rows / 2};
  if (source == place) return {.queries = all, .keys = all, .mask = {.causal = true}};
  if (source < place) return {.queries = all, .keys = first};
  return {.queries = second, .keys = all};
}

/// Of queries that stand `ahead` rows behind the keys of the same number: those that see them.
at::Tensor window_mask(int64_t rows, int64_t ahead, int64_t window, c10::Device device) {
  const auto numbers = at::arange(rows, at::TensorOptions(at::kLong).device(device));
  const at::Tensor queries = numbers.unsqueeze(1) + ahead, keys = numbers.unsqueeze(0);
  return queries.ge(keys).logical_and(queries.lt(keys + window)).view({1, 1, rows, rows});
}

}  // namespace

std::vector<RingBlock> ring_blocks(const RingMask& mask, int64_t places, int64_t place, int64_t source, int64_t rows,
                                   c10::Device device) {
  const int64_t chunk = rows / 2;
  const bool has_window = mask.window > 0 && mask.window < places * rows;
  if (!mask.allowed.defined() && !has_window) return {causal_block(place, source, rows)};
  const int64_t chunks_here[] = {place, 2 * places - 1 - place}, chunks_there[] = {source, 2 * places - 1 - source};
  std::vector<RingBlock> blocks;
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t ahead = (chunks_here[i] - chunks_there[j]) * chunk;
      const bool is_seen = ahead == 0 || (ahead > 0 && (!has_window || ahead - chunk + 1 < mask.window));
      if (!is_seen) continue;
      RingBlock block{.queries = {i * chunk, chunk}, .keys = {j * chunk, chunk}};
      auto& allowed = block.mask.allowed;
      if (mask.allowed.defined())
        allowed = mask.allowed.narrow(2, i * chunk, chunk).narrow(3, chunks_there[j] * chunk, chunk);
      if (has_window && ahead + chunk > mask.window) {
        const at::Tensor within = window_mask(chunk, ahead, mask.window, device);
        allowed = allowed.defined() ? allowed.logical_and(within) : within;
      }
      block.mask.causal = ahead == 0 && !allowed.defined();
      blocks.push_back(std::move(block));
    }
  }
  return blocks;
}

}  // namespace megashard
