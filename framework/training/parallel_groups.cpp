#include "framework/training/parallel_groups.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <numeric>
#include <vector>

#include "framework/mistakes.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

ParallelGroups::ParallelGroups(const DistributedArguments& arguments, const ProcessGroupPtr& all)
    : ParallelGroups(all) {
  const auto pieces = static_cast<int>(arguments.tensor_model_parallel_size);
  if (pieces == 1) return;
  const int first = all->rank() / pieces * pieces;
  std::vector<int> neighbours, alike;
  for (int rank = 0; rank < all->size(); ++rank) {
    if (rank / pieces * pieces == first) neighbours.push_back(rank);
    if (rank % pieces == all->rank() % pieces) alike.push_back(rank);
  }
  tensor_parallel = all->split(neighbours, "tensor_parallel");
  sharding = all->split(alike, "sharding");
}

SequenceShard sequence_ranks(const ContextParallelArguments& arguments, const MultiModalModule& model,
                             const ProcessGroupPtr& group) {
  const auto ranks = static_cast<int>(arguments.context_parallel_size);
  if (ranks == 1) return {};
  const int64_t ring = arguments.ring_size(), sharing_heads = ranks / ring;
  if (sharing_heads > 1) value_errors_are_mistakes([&] { model.check_sequence_ranks(sharing_heads); });
  if (ring > 1) model.check_sequence_ring();
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), group->rank() / ranks * ranks);
  return share_sequences(group->split(members, "context_parallel"), ring);
}

ProcessGroupPtr data_parallel_group(const ContextParallelArguments& arguments, const ProcessGroupPtr& group) {
  const auto ranks = static_cast<int>(arguments.context_parallel_size);
  if (ranks == 1) return group;
  std::vector<int> members;
  for (int rank = group->rank() % ranks; rank < group->size(); rank += ranks) members.push_back(rank);
  return group->split(members, "data_parallel");
}

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
