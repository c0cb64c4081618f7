#pragma once

#include "parallel/copies/float8_quantise.h"
#include "parallel/fsdp/custom_comm.h"

namespace megashard {

/// Gathers a parameter as float8_e4m3fn: a quarter of the bytes of fp32, half of those of bf16.
/// Each rank sends its rows with a scale of their own, or with one for each row, so none waits for
/// another's amax; the whole is rebuilt in the compute dtype. What the optimizer sees and the
/// gradients stay as they are.
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
