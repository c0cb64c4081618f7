#include "parallel/fsdp/float8_all_gather.h"

namespace megashard {
namespace {

/// Product of the last dimensions, as many as give at least 16 values: a row of a matrix or of each stacked matrix, a
/// filter of a convolution. Scales then take at most a quarter of the payload's bytes.
int64_t row_numel(at::IntArrayRef chunk_sizes) {
  int64_t numel = 1;
  for (size_t dim = chunk_sizes.size(); dim > 0 && numel < 16; --dim) numel *= chunk_sizes[dim - 1];
  return numel;
}

}  // namespace

std::vector<AllGatherExtension::Payload> Float8AllGather::payloads(const GatherShape& shape) {
  const int64_t numel = c10::multiply_integers(shape.chunk_sizes);
  return {{at::kFloat8_e4m3fn, numel},
          {at::kFloat, scale_ == Float8Scale::kRowAmax ? numel / row_numel(shape.chunk_sizes) : 1}};
}

void Float8AllGather::pack(const GatherShape& /*shape*/, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) {
  quantise_float8(rows, payloads[0], payloads[1], scale_);
}

void Float8AllGather::unpack(const GatherShape& shape, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) {
  dequantise_float8(payloads[0], payloads[1], shape.shard_dim, shape.chunk_sizes[shape.shard_dim], whole);
}

}  // namespace megashard
