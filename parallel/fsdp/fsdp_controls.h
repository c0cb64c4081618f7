#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "parallel/device/streams.h"
#include "parallel/fsdp/custom_comm.h"

namespace megashard {

// Run-time controls: the methods of PyTorch 2.11's FSDPModule, where no other origin is named; docs/terms.md has those
// whose names differ. With `recurse` they also change the units inside the module, which need not be one itself. The
// others throw for a module that is not under fully_shard; they change its own groups, set_unshard_async_op those of
// the units inside it too. "Of the root": they hold for all units under a root, on whichever of them they are called;
// before the root's first forward, a call on itself comes before one on a unit inside it.

/// Units of another root: only of one that shares the comm context.
void set_modules_to_forward_prefetch(torch::nn::Module& module, std::span<torch::nn::Module* const> next);
void set_modules_to_backward_prefetch(torch::nn::Module& module, std::span<torch::nn::Module* const> next);
void set_reshard_after_forward(torch::nn::Module& module, bool reshard, bool recurse = true);
void set_reshard_after_backward(torch::nn::Module& module, bool reshard, bool recurse = true);
/// false: another forward and backward follow before the optimizer steps, so units that are not resharded after forward
/// stay gathered for it. Ours.
void set_is_last_microbatch(torch::nn::Module& module, bool last, bool recurse = true);
/// false: backward does not gather this unit, whose gradients need no weights (embeddings).
void set_unshard_in_backward(torch::nn::Module& module, bool unshard);
/// CUDA: gathers of these units are packed on the compute stream, so that their buffers come from
/// its memory; only explicit prefetch overlaps then.
void set_unshard_async_op(torch::nn::Module& module, bool async_op);

/// A gather that was started by hand; the next forward of the module waits for it in any case.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::function<void()> wait = {}) : wait_(std::move(wait)) {}
  void wait() {
    if (wait_) std::exchange(wait_, {})();
  }

 private:
  std::function<void()> wait_;
};
/// Gathers now; forward and backward do it by themselves. async_op: returns at once.
UnshardHandle unshard(torch::nn::Module& module, bool async_op = false);
/// Frees the gathered parameters now.
void reshard(torch::nn::Module& module);

/// false: gradients stay unsharded and unreduced until a backward with true (accumulation without
/// communication).
void set_requires_gradient_sync(torch::nn::Module& module, bool sync, bool recurse = true);
/// HSDP, false: gradients are reduce-scattered but not all-reduced across replicas until a backward
/// with true.
void set_requires_all_reduce(torch::nn::Module& module, bool all_reduce, bool recurse = true);
/// false: backward callbacks leave reductions in flight and the order of prefetch alone (several
/// backwards a step). Of the root.
void set_is_last_backward(torch::nn::Module& module, bool last);

/// Whole gradients in the reduce dtype that wait for their reduction (accumulation without sync),
/// by parameter; empty ones left out. This and the next two are ours.
std::vector<std::pair<at::Tensor, at::Tensor>> pending_gradients(torch::nn::Module& module, bool recurse = true);
/// Drops them, and HSDP's partial sums too.
void clear_pending_gradients(torch::nn::Module& module, bool recurse = true);
/// Reduces them now, outside backward, into the parameters' sharded gradients. Collective: every
/// rank has some waiting, or none has.
void synchronize_gradients(torch::nn::Module& module, bool recurse = true);

/// Gradients are summed over the ranks and divided by `factor` instead of the number of ranks. This
/// unit only.
void set_gradient_divide_factor(torch::nn::Module& module, double factor);
/// Reductions sum and divide afterwards, where a backend's average is not wanted.
void set_force_sum_reduction(torch::nn::Module& module, bool force);
/// Called with the reduced buffers, 1-D in the reduce dtype, before they become gradients, on the
/// stream of the reduction, or on `stream`: for a replication that the mesh does not know (DiLoCo,
/// hierarchical all-reduce); a stream is refused on an HSDP mesh, which has its own. Without hook:
/// null.
void set_all_reduce_hook(torch::nn::Module& module, std::function<void(at::Tensor& reduced)> hook,
                         std::optional<c10::Stream> stream = std::nullopt);
/// Other collectives than the group's; null: the group's again. See custom_comm.h.
void set_custom_all_gather(torch::nn::Module& module, std::shared_ptr<AllGather> all_gather);
void set_custom_reduce_scatter(torch::nn::Module& module, std::shared_ptr<ReduceScatter> reduce_scatter);
/// Communication buffers come from the backend (NCCL: registered memory). Not with custom
/// collectives, which allocate by themselves. The last of this and the next call counts.
void set_allocate_memory_from_process_group(torch::nn::Module& module, bool allocate);
/// Communication buffers are of symmetric memory (GroupMemory::kSymmetric); gradients are summed, then divided: NCCL's
/// kernels on it do not average. Not with custom collectives. Of a PyTorch later than 2.11.
void set_symm_mem_for_comm(torch::nn::Module& module, bool symmetric);
/// How many reduce-scatter inputs may be in flight, 1 by default: more overlap for more memory, and
/// never another result. The largest value that was asked for counts. Of the root; of a PyTorch later
/// than 2.11.
void set_reduce_scatter_max_input_buffers(torch::nn::Module& module, int buffers);

/// The next forward's gathers wait for this event instead of all work on the current stream: what
/// follows the optimizer's step may overlap. Consumed once. Of the root.
void set_post_optim_event(torch::nn::Module& module, StreamEvent event);
/// Several roots (chunks of a pipeline) share streams and buffers in flight. Before any of them
/// runs.
void share_comm_context(std::span<torch::nn::Module* const> roots);

/// `hook` runs each time the parameter's sharded gradient is complete, in backward: an optimizer
/// that steps and frees it there needs no memory for gradients (optimizer in backward). PyTorch's is
/// a method of Tensor.
void register_post_accumulate_grad_hook(const at::Tensor& parameter,
                                        std::function<void(const at::Tensor& parameter)> hook);

/// From the parameter's next gather on; null: plain again. The parameter must be under fully_shard.
/// Ours: PyTorch asks the parameter's tensor subclass.
void set_all_gather_extension(const at::Tensor& parameter, std::shared_ptr<AllGatherExtension> extension);

/// Reports "unshard", "pre_backward", "reshard", "post_backward" and "reduce" of each group, by
/// name, in host order. Of the root; ours.
void set_schedule_observer(torch::nn::Module& module,
                           std::function<void(const char* event, const std::string& group)> observer);

}  // namespace megashard
