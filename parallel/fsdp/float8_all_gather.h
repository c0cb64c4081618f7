#pragma once

#include "parallel/copies/float8_quantise.h"
#include "parallel/fsdp/custom_comm.h"

namespace megashard {

/// All-gathers a parameter as float8_e4m3fn: a quarter of fp32's bytes, half of bf16's. Each rank scales its own rows,
/// with one scale or one per row, so no rank waits for another's amax; the unsharded parameter has the compute dtype.
/// Optimizer and gradients are unaffected.
class Float8AllGather final : public AllGatherExtension {
 public:
  explicit Float8AllGather(Float8Scale scale = Float8Scale::kAmax) : scale_(scale) {}

  std::vector<Payload> payloads(const GatherShape& shape) override;
  void pack(const GatherShape& shape, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) override;
  void unpack(const GatherShape& shape, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) override;

 private:
  Float8Scale scale_;
};

}  // namespace megashard
