#include "models/config/tensor_parallel_ranks.h"

#include <c10/util/Exception.h>

#include "parallel/tensor_parallel/tensor_parallel_regions.h"

namespace megashard {

TensorParallelRanks::TensorParallelRanks(int64_t size, int64_t rank, bool sequence_parallel)
    : size_(size), rank_(rank), sequence_parallel_(sequence_parallel && size > 1) {}

void TensorParallelRanks::set_group(ProcessGroupPtr group) {
  TORCH_CHECK(group != nullptr, "the layers of this model are cut over ", size_,
              " ranks, but it is sharded without their group: give ShardingRequest::tensor_parallel_group");
  TORCH_CHECK(group->size() == size_ && group->rank() == rank_, "the model has piece ", rank_, " of ", size_,
              " of its layers, which is not that of rank ", group->rank(), " of group '", group->name(), "' of ",
              group->size(), " ranks: make it on this rank");
  group_ = std::move(group);
}

const ProcessGroupPtr& TensorParallelRanks::group() const {
  TORCH_CHECK(group_ != nullptr, "the layers of this model are cut over ", size_,
              " ranks that it does not know: shard the model by FSDP2Mixin::fully_shard first");
  return group_;
}

at::Tensor TensorParallelRanks::enter(const at::Tensor& hidden) const {
  if (size_ == 1) return hidden;
  return sequence_parallel_ ? gather_from_sequence_parallel_region(hidden, group())
                            : copy_to_tensor_parallel_region(hidden, group());
}

at::Tensor TensorParallelRanks::leave(const at::Tensor& partial) const {
  if (size_ == 1) return partial;
  return sequence_parallel_ ? reduce_scatter_to_sequence_parallel_region(partial, group())
                            : reduce_from_tensor_parallel_region(partial, group());
}

at::Tensor TensorParallelRanks::whole_sequence(const at::Tensor& hidden) const {
  return sequence_parallel_ ? gather_replicated_from_sequence_parallel_region(hidden, group()) : hidden;
}

at::Tensor TensorParallelRanks::own_rows(const at::Tensor& whole) const {
  return sequence_parallel_ ? scatter_to_sequence_parallel_region(whole, group()) : whole;
}

at::Tensor TensorParallelRanks::sum(const at::Tensor& partial) const {
  return size_ == 1 ? partial : reduce_from_tensor_parallel_region(partial, group());
}

at::Tensor TensorParallelRanks::with_summed_gradient(const at::Tensor& shared) const {
  return size_ == 1 ? shared : copy_to_tensor_parallel_region(shared, group());
}

at::Tensor TensorParallelRanks::for_own_rows(const at::Tensor& weight) const {
  return sequence_parallel_ ? with_summed_gradient(weight) : weight;
}

}  // namespace megashard
