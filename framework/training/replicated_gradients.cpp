#include "framework/training/replicated_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include "parallel/fsdp/fully_shard.h"

namespace megashard {

std::vector<at::Tensor> replicated_parameters(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : parameters) {
    if (!is_sharded(parameter) && reshard_and_view(parameter).is_replicated()) found.push_back(parameter);
  }
  return found;
}

void reduce_replicated_gradients(const std::vector<at::Tensor>& parameters, ProcessGroup& group) {
  if (parameters.empty() || group.size() == 1) return;
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(parameters.size());
  int64_t elements = count;  // the last ones say which ranks have a gradient
  at::ScalarType dtype = at::kFloat;
  for (const at::Tensor& parameter : parameters) {
    elements += parameter.numel();
    dtype = c10::promoteTypes(dtype, parameter.scalar_type());
  }
  const auto device = parameters.front().device();
  const at::Tensor buffer = at::zeros({elements}, at::dtype(dtype).device(device));
  const at::Tensor has_gradient = buffer.narrow(0, elements - count, count);
  int64_t begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& parameter = parameters[static_cast<size_t>(i)];
    if (const at::Tensor& gradient = parameter.grad(); gradient.defined()) {
      buffer.narrow(0, begin, parameter.numel()).view(parameter.sizes()).copy_(gradient);
      has_gradient.narrow(0, i, 1).fill_(1);
    }
    begin += parameter.numel();
  }
  group.all_reduce(buffer, ReduceOp::kAvg).wait();
  const at::Tensor known = has_gradient.cpu().to(at::kDouble);
  begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& parameter = parameters[static_cast<size_t>(i)];
    const at::Tensor mean = buffer.narrow(0, begin, parameter.numel()).view(parameter.sizes());
    begin += parameter.numel();
    if (known.const_data_ptr<double>()[i] > 0)
      parameter.mutable_grad() = mean.to(parameter.scalar_type(), false, /*copy=*/true);
  }
}

}  // namespace megashard
