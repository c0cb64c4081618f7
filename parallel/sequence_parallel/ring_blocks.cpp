#include "parallel/sequence_parallel/ring_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

namespace megashard {
namespace {

/// Without masks, causality leaves one block. The chunks of `source` lie on both sides of those of `place`, or between
/// them.
RingBlock causal_block(int64_t place, int64_t source, int64_t rows) {
  const RowRange all{0, rows}, first{0, rows / 2}, second{rows / 2, rows / 2};
  if (source == place) return {.queries = all, .keys = all, .mask = {.causal = true}};
  if (source < place) return {.queries = all, .keys = first};
  return {.queries = second, .keys = all};
}

/// All keys of `source`, or those that the mask has.
RingBlock whole_block(const RingMask& mask, int64_t places, int64_t source, int64_t rows) {
  const int64_t chunk = rows / 2;
  RingBlock block{.queries = {0, rows}, .keys = {0, rows}};
  if (!mask.keys.defined()) return block;
  const auto of_chunk = [&](int64_t each) { return mask.keys.narrow(1, each * chunk, chunk); };
  block.mask.allowed = at::cat({of_chunk(source), of_chunk(2 * places - 1 - source)}, 1).unsqueeze(1).unsqueeze(1);
  return block;
}

/// Positions of rows in the sequence.
at::Tensor numbers_of(const RowRange& rows, c10::Device device) {
  return at::arange(rows.begin, rows.begin + rows.size, at::TensorOptions(at::kLong).device(device));
}

/// Mask of some queries and keys, given by their positions in the sequence.
at::Tensor seen(const RingMask& mask, const RowRange& queries, const RowRange& keys, c10::Device device) {
  const at::Tensor query = numbers_of(queries, device).view({1, 1, -1, 1}), key = numbers_of(keys, device);
  at::Tensor allowed = query.ge(key);
  if (mask.window > 0) allowed = allowed.logical_and(query.lt(key + mask.window));
  if (!mask.document_begins.defined()) return allowed;
  const at::Tensor first = mask.document_begins.narrow(1, queries.begin, queries.size);
  return allowed.logical_and(key.ge(first.unsqueeze(1).unsqueeze(3)));
}

}  // namespace

std::vector<RingBlock> ring_blocks(const RingMask& mask, int64_t places, int64_t place, int64_t source, int64_t rows,
                                   c10::Device device) {
  if (!mask.causal) return {whole_block(mask, places, source, rows)};
  const int64_t chunk = rows / 2;
  const bool has_window = mask.window > 0 && mask.window < places * rows;
  const bool has_documents = mask.document_begins.defined();
  if (!has_documents && !has_window) return {causal_block(place, source, rows)};
  const int64_t chunks_here[] = {place, 2 * places - 1 - place}, chunks_there[] = {source, 2 * places - 1 - source};
  std::vector<RingBlock> blocks;
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t ahead = (chunks_here[i] - chunks_there[j]) * chunk;
      const bool is_seen = ahead == 0 || (ahead > 0 && (!has_window || ahead - chunk + 1 < mask.window));
      if (!is_seen) continue;
      RingBlock block{.queries = {i * chunk, chunk}, .keys = {j * chunk, chunk}};
      if (has_documents || (has_window && ahead + chunk > mask.window)) {
        block.mask.allowed = seen(mask, {chunks_here[i] * chunk, chunk}, {chunks_there[j] * chunk, chunk}, device);
      } else {
        block.mask.causal = ahead == 0;
      }
      blocks.push_back(std::move(block));
    }
  }
  return blocks;
}

}  // namespace megashard
