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

// Run-time controls. They mirror the methods of PyTorch 2.15's FSDPModule unless marked otherwise; docs/terms.md lists
// those with other names. With `recurse` a control applies to all units inside the module, which need not be a unit.
// The others throw for a module that is not under fully_shard and apply to its own groups only (set_unshard_async_op:
// to units inside it, too). "Root-wide" controls apply to all units under a root, whichever unit they are called on;
// before the root's first forward, call them on the root before units inside it.

/// Both prefetch lists may name units of another root only if it shares the comm context.
void set_modules_to_forward_prefetch(torch::nn::Module& module, std::span<torch::nn::Module* const> next);
void set_modules_to_backward_prefetch(torch::nn::Module& module, std::span<torch::nn::Module* const> next);
void set_reshard_after_forward(torch::nn::Module& module, bool reshard, bool recurse = true);
void set_reshard_after_backward(torch::nn::Module& module, bool reshard, bool recurse = true);
/// false: another forward and backward follow before the optimizer step, so units that are not resharded after forward
/// stay unsharded for it. Ours.
void set_is_last_microbatch(torch::nn::Module& module, bool last, bool recurse = true);
/// false: backward does not unshard this unit; for units whose gradients need no weights (embeddings).
void set_unshard_in_backward(torch::nn::Module& module, bool unshard);
/// CUDA: packs the all-gathers of these units on the compute stream, so that their buffers come from its memory; only
/// explicit prefetch overlaps then.
void set_unshard_async_op(torch::nn::Module& module, bool async_op);

/// A wait that is due once; later calls do nothing.
class WaitHandle {
 public:
  explicit WaitHandle(std::function<void()> wait = {}) : wait_(std::move(wait)) {}
  void wait() {
    if (wait_) std::exchange(wait_, {})();
  }

 private:
  std::function<void()> wait_;
};

/// An explicit unshard. The module's next forward waits for it in any case.
using UnshardHandle = WaitHandle;
/// Starts the all-gather now and waits for it, or returns at once if async_op. Forward and backward unshard by
/// themselves.
UnshardHandle unshard(torch::nn::Module& module, bool async_op = false);
/// Frees the gathered parameters now.
void reshard(torch::nn::Module& module);
/// Calls `body`, in which forwards leave the parameters of all units inside `module` unsharded, for many forwards of
/// the same weights without a backward. Then reshards them. `module` need not be under fully_shard. Ours.
void run_unsharded(torch::nn::Module& module, const std::function<void()>& body);
/// true: a reshard keeps the memory of unsharded parameters, so that their addresses stay the same (for CUDA graphs).
/// Takes the memory of all of them.
void set_keep_unsharded_storage(torch::nn::Module& module, bool keep, bool recurse = true);

/// false: backward accumulates unsharded gradients without communication until a backward with true.
void set_requires_gradient_sync(torch::nn::Module& module, bool sync, bool recurse = true);
/// false (HSDP): backward reduce-scatters gradients but leaves the all-reduce across replicas to a backward with true.
void set_requires_all_reduce(torch::nn::Module& module, bool all_reduce, bool recurse = true);
/// false: the end of backward does not wait for reductions and keeps the prefetch order, for several backwards per
/// step. Root-wide.
void set_is_last_backward(torch::nn::Module& module, bool last);

/// true: finalize_backward starts the reductions that are due and waits for all of them; the end of a backward does
/// not. For schedules that reduce gradients in a step of their own. Overrides set_is_last_backward. On the root only;
/// throws between a backward and its finalize_backward.
void set_manual_backward_finalization(torch::nn::Module& root, bool manual);

/// A gradient reduction in flight, of finalize_backward(async_op=true). Until wait() has returned, forward and
/// finalize_backward throw, on the root and on roots that share its comm context; then gradients may be used. wait()
/// throws if reset_iter_state discarded the reduction.
using GradientReductionHandle = WaitHandle;
/// Starts the reductions that are due and, unless async_op, waits for them. Run the step's backwards without gradient
/// sync, enable it, then call this. No-op before the root's first forward. Throws without
/// set_manual_backward_finalization, and with async_op while another root that shares the comm context has work.
GradientReductionHandle finalize_backward(torch::nn::Module& root, bool async_op = false);
/// Discards an iteration that an exception ended: its collectives and all unreduced gradients, those of earlier
/// backwards without gradient sync included. Reshards. Without this call the next forward works, too, but keeps those
/// gradients. Throws for a module other than the root.
void reset_iter_state(torch::nn::Module& root);

/// Unsharded gradients that wait for their reduction (set_requires_gradient_sync), as pairs (parameter, gradient in the
/// reduce dtype), without empty ones. Ours, as are the next two.
std::vector<std::pair<at::Tensor, at::Tensor>> pending_gradients(torch::nn::Module& module, bool recurse = true);
/// Drops pending gradients and HSDP's partial sums.
void clear_pending_gradients(torch::nn::Module& module, bool recurse = true);
/// Reduces pending gradients now, outside backward, into the sharded gradients. Collective: either every rank has
/// pending gradients or none has.
void synchronize_gradients(torch::nn::Module& module, bool recurse = true);

/// Divides the gradients' sum over ranks by `factor` instead of the number of ranks. This unit only.
void set_gradient_divide_factor(torch::nn::Module& module, double factor);
/// Reductions sum, then divide, instead of using the backend's average.
void set_force_sum_reduction(torch::nn::Module& module, bool force);
/// Calls `hook` with each reduced buffer (1-D, reduce dtype) before it becomes gradients, on `stream` or else the
/// reduction's stream: for replication outside the mesh (DiLoCo, hierarchical all-reduce). Throws for a stream on an
/// HSDP mesh, which has its own. A null hook removes it.
void set_all_reduce_hook(torch::nn::Module& module, std::function<void(at::Tensor& reduced)> hook,
                         std::optional<c10::Stream> stream = std::nullopt);
/// Replace the group's collectives; null restores them. See custom_comm.h.
void set_custom_all_gather(torch::nn::Module& module, std::shared_ptr<AllGather> all_gather);
void set_custom_reduce_scatter(torch::nn::Module& module, std::shared_ptr<ReduceScatter> reduce_scatter);
/// Allocates communication buffers by the backend (NCCL: registered memory). Not with custom collectives, which
/// allocate by themselves. The last call of this and the next function wins.
void set_allocate_memory_from_process_group(torch::nn::Module& module, bool allocate);
/// Allocates communication buffers in symmetric memory (GroupMemory::kSymmetric); gradients are summed, then divided,
/// because NCCL's kernels on it do not average. Not with custom collectives.
void set_symm_mem_for_comm(torch::nn::Module& module, bool symmetric);
/// true: reductions run in a process group of their own, so that they overlap with all-gathers, which one NCCL
/// communicator runs in turn. Makes one group for each sharding group; collective over it.
void set_separate_reduce_scatter_group(torch::nn::Module& module, bool separate = true, bool recurse = true);
/// Maximum number of reduce-scatter inputs in flight (default 1): more overlap for more memory, same results. The
/// largest value set under a root wins. Root-wide.
void set_reduce_scatter_max_input_buffers(torch::nn::Module& module, int buffers);

/// The next forward's all-gathers wait for this event instead of all work on the current stream, so that work after the
/// optimizer step may overlap. Used once. Root-wide.
void set_post_optim_event(torch::nn::Module& module, StreamEvent event);
/// Lets several roots (pipeline chunks) share streams and buffers in flight. Call before any of them runs.
void share_comm_context(std::span<torch::nn::Module* const> roots);

/// Calls `hook` in backward each time the parameter's sharded gradient is complete. An optimizer that steps and frees
/// the gradient there needs no memory for all gradients (optimizer in backward). A method of Tensor in PyTorch.
void register_post_accumulate_grad_hook(const at::Tensor& parameter,
                                        std::function<void(const at::Tensor& parameter)> hook);

/// Takes effect at the parameter's next all-gather; null removes the extension. Throws if the parameter is not under
/// fully_shard. Ours: PyTorch calls the parameter's tensor subclass.
void set_all_gather_extension(const at::Tensor& parameter, std::shared_ptr<AllGatherExtension> extension);

/// Reports "unshard", "pre_backward", "reshard", "post_backward" and "reduce" with the group's name, in host order.
/// Root-wide; ours.
void set_schedule_observer(torch::nn::Module& module,
                           std::function<void(const char* event, const std::string& group)> observer);

}  // namespace megashard
