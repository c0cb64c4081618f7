#include "parallel/tensor_parallel/tensor_parallel_regions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/movedim.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "parallel/device/torch_versions.h"

namespace megashard {
namespace {

using Region = at::Tensor (*)(const at::Tensor&, const ProcessGroupPtr&);

/// Backward is the counterpart; it is recorded for second derivatives.
class RegionNode final : public torch::autograd::Node {
 public:
  RegionNode(const char* name, torch::autograd::edge_list next, Region counterpart, ProcessGroupPtr group)
      : Node(std::move(next)), name_(name), counterpart_(counterpart), group_(std::move(group)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {counterpart_(gradients[0], group_)};
  }
  std::string name() const override { return name_; }

 private:
  const char* name_;
  Region counterpart_;
  ProcessGroupPtr group_;
};

at::Tensor recorded(const char* name, const at::Tensor& input, const at::Tensor& output, Region counterpart,
                    const ProcessGroupPtr& group) {
  if (!c10::GradMode::is_enabled() || !input.requires_grad()) return output;
  torch::autograd::edge_list edges{torch::autograd::impl::gradient_edge(input)};
  const auto node = make_node<RegionNode>(name, std::move(edges), counterpart, group);
  at::Tensor result = output.detach();
  torch::autograd::impl::set_gradient_edge(result, {node, node->add_input_metadata(result)});
  return result;
}

at::Tensor summed(const at::Tensor& input, ProcessGroup& group) {
  const at::Tensor sum = input.detach().clone(at::MemoryFormat::Contiguous);
  group.all_reduce(sum, ReduceOp::kSum).wait();
  return sum;
}

at::Tensor piece_of(const at::Tensor& input, const ProcessGroup& group) {
  TORCH_CHECK(input.dim() > 0 && input.size(-1) % group.size() == 0, "a tensor of sizes ", input.sizes(),
              " cannot be scattered over the ", group.size(), " ranks of group '", group.name(),
              "': its last dimension must be a multiple of their number");
  const int64_t length = input.size(-1) / group.size();
  return input.detach().narrow(-1, group.rank() * length, length);
}

at::Tensor pieces_together(const at::Tensor& input, ProcessGroup& group) {
  TORCH_CHECK(input.dim() > 0, "a 0-d tensor has no last dimension to gather on");
  const at::Tensor mine = input.detach().contiguous();
  const int64_t length = mine.size(-1), ranks = group.size();
  const int64_t rows = length == 0 ? 0 : mine.numel() / length;
  const at::Tensor pieces = at::empty({ranks, rows, length}, mine.options());
  group.all_gather_into(pieces.view({-1}), mine.view({-1})).wait();
  auto sizes = mine.sizes().vec();
  sizes.back() = ranks * length;
  return pieces.transpose(0, 1).reshape(sizes);
}

void check_rows(const at::Tensor& input, const ProcessGroup& group) {
  TORCH_CHECK(input.dim() >= 2 && input.size(1) % group.size() == 0, "a sequence of sizes ", input.sizes(),
              " cannot be shared by the ", group.size(), " ranks of group '", group.name(),
              "': sequence parallelism needs a length (dimension 1) that is a multiple of their number");
}

/// [B, T, ...] -> [ranks, B, T / ranks, ...], a view.
at::Tensor by_rank(const at::Tensor& input, const ProcessGroup& group) {
  return input.unflatten(1, {group.size(), input.size(1) / group.size()}).movedim(1, 0);
}

at::Tensor own_rows(const at::Tensor& input, ProcessGroup& group) {
  check_rows(input, group);
  const int64_t rows = input.size(1) / group.size();
  return input.detach().narrow(1, group.rank() * rows, rows).contiguous();
}

at::Tensor rows_together(const at::Tensor& rows, ProcessGroup& group) {
  const at::Tensor mine = rows.detach().contiguous();
  auto sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), group.size());
  const at::Tensor all = at::empty(sizes, mine.options());
  group.all_gather_into(all.view({-1}), mine.view({-1})).wait();
  return all.movedim(0, 1).flatten(1, 2);
}

at::Tensor own_rows_of_sum(const at::Tensor& input, ProcessGroup& group) {
  check_rows(input, group);
  const at::Tensor pieces = by_rank(input.detach(), group).contiguous();
  const at::Tensor mine = at::empty_like(pieces[0], at::MemoryFormat::Contiguous);
  group.reduce_scatter_into(mine.view({-1}), pieces.view({-1}), ReduceOp::kSum).wait();
  return mine;
}

}  // namespace

at::Tensor copy_to_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group) {
  if (group->size() == 1) return input;
  return recorded("CopyToTensorParallelRegion", input, input, &reduce_from_tensor_parallel_region, group);
}

at::Tensor reduce_from_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group) {
  if (group->size() == 1) return input;
  return recorded("ReduceFromTensorParallelRegion", input, summed(input, *group), &copy_to_tensor_parallel_region,
                  group);
}

at::Tensor scatter_to_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group) {
  if (group->size() == 1) return input;
  return recorded("ScatterToTensorParallelRegion", input, piece_of(input, *group), &gather_from_tensor_parallel_region,
                  group);
}

at::Tensor gather_from_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group) {
  if (group->size() == 1) return input;
  return recorded("GatherFromTensorParallelRegion", input, pieces_together(input, *group),
                  &scatter_to_tensor_parallel_region, group);
}

at::Tensor gather_from_sequence_parallel_region(const at::Tensor& rows, const ProcessGroupPtr& group) {
  if (group->size() == 1) return rows;
  return recorded("GatherFromSequenceParallelRegion", rows, rows_together(rows, *group),
                  &reduce_scatter_to_sequence_parallel_region, group);
}

at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group) {
  if (group->size() == 1) return input;
  return recorded("ReduceScatterToSequenceParallelRegion", input, own_rows_of_sum(input, *group),
                  &gather_from_sequence_parallel_region, group);
}

at::Tensor gather_replicated_from_sequence_parallel_region(const at::Tensor& rows, const ProcessGroupPtr& group) {
  if (group->size() == 1) return rows;
  return recorded("GatherReplicatedFromSequenceParallelRegion", rows, rows_together(rows, *group),
                  &scatter_to_sequence_parallel_region, group);
}

at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group) {
  if (group->size() == 1) return input;
  return recorded("ScatterToSequenceParallelRegion", input, own_rows(input, *group),
                  &gather_replicated_from_sequence_parallel_region, group);
}

}  // namespace megashard
