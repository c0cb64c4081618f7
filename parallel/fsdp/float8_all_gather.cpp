#include "parallel/fsdp/float8_all_gather.h"

namespace megashard {

std::vector<AllGatherExtension::Payload> Float8AllGather::payloads(const GatherShape& shape) {
  return {{at::kFloat8_e4m3fn, c10::multiply_integers(shape.chunk_sizes)}, {at::kFloat, 1}};
}

void Float8AllGather::pack(const GatherShape& /*shape*/, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) {
  quantise_float8(rows, payloads[0], payloads[1], scale_);
}

void Float8AllGather::unpack(const GatherShape& shape, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) {
  dequantise_float8(payloads[0], payloads[1], shape.shard_dim, shape.chunk_sizes[shape.shard_dim], whole);
}

}  // namespace megashard
