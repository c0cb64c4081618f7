#include "parallel/fsdp/fsdp_controls.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "parallel/fsdp/detail/fsdp_state.h"

namespace megashard {
namespace {

using torch::nn::Module;

FsdpState& state_of(const Module& module) {
  const auto state = fsdp_state(module);
  TORCH_CHECK(state != nullptr, "module ", detail::demangled_class_name(typeid(module).name()),
              " is not under fully_shard");
  return *state;
}

template <class F>
void for_each_group(Module& module, bool recurse, F f) {
  std::unordered_set<const FsdpState*> seen;
  auto visit = [&](const Module& each) {
    const auto state = fsdp_state(each);
    if (state == nullptr || !seen.insert(state.get()).second) return;
    for (const auto& group : state->groups()) f(*group);
  };
  visit(module);
  if (!recurse) return;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) visit(*item.value());
}

void set_prefetch(std::vector<std::weak_ptr<FsdpState>>& list, std::span<Module* const> next) {
  list.clear();
  for (auto* module : next) list.push_back(state_of(*module).weak_from_this());
}

FsdpContext& context_of(Module& module) { return state_of(module).ensure_context(); }

/// Changes the module's own groups.
template <class F>
void change_own_groups(Module& module, F f) {
  for (const auto& group : state_of(module).groups()) f(*group);
}

/// Changes options that exclude each other.
template <class F>
void change_comm(FsdpParamGroup& group, F change) {
  CommOptions comm = group.comm;
  change(comm);
  TORCH_CHECK_VALUE(!comm.memory || (comm.all_gather == nullptr && comm.reduce_scatter == nullptr),
                    "buffers from the process group's memory and custom collectives, which allocate by themselves, "
                    "exclude each other: take one of them");
  group.comm = std::move(comm);
}

/// on: allocates buffers from `memory`. Off: stops that if they came from `memory`.
void change_memory(Module& module, bool on, GroupMemory memory) {
  change_own_groups(module, [=](FsdpParamGroup& group) {
    change_comm(group, [=](CommOptions& comm) {
      if (on) comm.memory = memory;
      if (!on && comm.memory == memory) comm.memory.reset();
    });
    group.forget_all_gathers();
  });
}

FsdpParam& param_of(const at::Tensor& parameter, const char* operation) {
  FsdpParam* param = find_fsdp_param(parameter);
  TORCH_CHECK(param != nullptr, operation, " needs a parameter under fully_shard, and got a tensor of sizes ",
              parameter.defined() ? parameter.sizes() : at::IntArrayRef{}, " that is not");
  return *param;
}

}  // namespace

void set_modules_to_forward_prefetch(Module& module, std::span<Module* const> next) {
  set_prefetch(state_of(module).forward_prefetch, next);
}

void set_modules_to_backward_prefetch(Module& module, std::span<Module* const> next) {
  set_prefetch(state_of(module).backward_prefetch, next);
}

void set_reshard_after_forward(Module& module, bool reshard, bool recurse) {
  for_each_group(module, recurse, [=](FsdpParamGroup& group) { group.reshard_after_forward = reshard; });
}

void set_reshard_after_backward(Module& module, bool reshard, bool recurse) {
  for_each_group(module, recurse, [=](FsdpParamGroup& group) { group.reshard_after_backward = reshard; });
}

void set_is_last_microbatch(Module& module, bool last, bool recurse) {
  for_each_group(module, recurse, [=](FsdpParamGroup& group) { group.is_last_microbatch = last; });
}

void set_unshard_in_backward(Module& module, bool unshard) {
  for_each_group(module, /*recurse=*/false, [=](FsdpParamGroup& group) { group.unshard_in_backward = unshard; });
}

void set_unshard_async_op(Module& module, bool async_op) {
  for_each_group(module, /*recurse=*/true, [=](FsdpParamGroup& group) {
    group.unshard_async_op = async_op;
    group.forget_all_gathers();
  });
}

UnshardHandle unshard(Module& module, bool async_op) {
  FsdpState& state = state_of(module);
  state.start_unshard();
  if (async_op) return UnshardHandle([self = state.shared_from_this()] { self->wait_for_unshard(); });
  state.wait_for_unshard();
  return UnshardHandle();
}

void reshard(Module& module) { state_of(module).reshard(); }

void run_unsharded(Module& module, const std::function<void()>& body) {
  std::vector<std::pair<FsdpParamGroup*, ReshardAfterForward>> before;
  for_each_group(module, /*recurse=*/true, [&](FsdpParamGroup& group) {
    before.emplace_back(&group, group.reshard_after_forward);
    group.reshard_after_forward = false;
  });
  const auto end = [&] {
    for (const auto& [group, kind] : before) {
      group->reshard_after_forward = kind;
      group->reshard();
    }
  };
  try {
    body();
  } catch (...) {
    end();
    throw;
  }
  end();
}

void set_keep_unsharded_storage(Module& module, bool keep, bool recurse) {
  for_each_group(module, recurse, [=](FsdpParamGroup& group) { group.keep_unsharded_storage = keep; });
}

void set_requires_gradient_sync(Module& module, bool sync, bool recurse) {
  for_each_group(module, recurse, [sync](FsdpParamGroup& group) {
    group.reduce_grads = sync;
    group.all_reduce_grads = sync;
  });
}

void set_requires_all_reduce(Module& module, bool all_reduce, bool recurse) {
  for_each_group(module, recurse, [=](FsdpParamGroup& group) { group.all_reduce_grads = all_reduce; });
}

void set_is_last_backward(Module& module, bool last) { context_of(module).is_last_backward = last; }

void set_manual_backward_finalization(Module& root, bool manual) {
  FsdpState& state = state_of(root);
  state.context_of_root("set_manual_backward_finalization");
  state.ensure_context().set_manual_finalization(manual);
}

GradientReductionHandle finalize_backward(Module& root, bool async_op) {
  FsdpContext* context = state_of(root).context_of_root("finalize_backward");
  return context == nullptr ? GradientReductionHandle() : context->finalize_backward(async_op);
}

void reset_iter_state(Module& root) {
  FsdpContext* context = state_of(root).context_of_root("reset_iter_state");
  if (context != nullptr) context->reset_iteration();
}

std::vector<std::pair<at::Tensor, at::Tensor>> pending_gradients(Module& module, bool recurse) {
  std::vector<std::pair<at::Tensor, at::Tensor>> pending;
  for_each_group(module, recurse, [&](FsdpParamGroup& group) {
    for (const auto& param : group.params()) {
      const at::Tensor& grad = param->unsharded_accumulated_grad();
      if (grad.defined()) pending.emplace_back(param->parameter(), grad);
    }
  });
  return pending;
}

void clear_pending_gradients(Module& module, bool recurse) {
  for_each_group(module, recurse, [](FsdpParamGroup& group) { group.clear_pending_grads(); });
}

void synchronize_gradients(Module& module, bool recurse) {
  for_each_group(module, recurse, [](FsdpParamGroup& group) { group.synchronize_grads(); });
}

void set_gradient_divide_factor(Module& module, double factor) {
  TORCH_CHECK_VALUE(factor > 0, "the gradient divide factor must be positive, got ", factor);
  change_own_groups(module, [=](FsdpParamGroup& group) { group.comm.gradient_divide_factor = factor; });
}

void set_force_sum_reduction(Module& module, bool force) {
  change_own_groups(module, [=](FsdpParamGroup& group) { group.comm.force_sum_reduction = force; });
}

void set_all_reduce_hook(Module& module, std::function<void(at::Tensor& reduced)> hook,
                         std::optional<c10::Stream> stream) {
  change_own_groups(module, [&](FsdpParamGroup& group) {
    TORCH_CHECK_VALUE(!stream || group.layout().replicate_group == nullptr, "the all-reduce hook of '", group.name(),
                      "' cannot have a stream of its own: its mesh has replicas, whose all-reduce runs on a stream "
                      "already. Leave the stream out, or shard over a 1-D mesh");
    group.comm.all_reduce_hook = hook;
    group.comm.all_reduce_hook_stream = stream;
  });
}

void set_custom_all_gather(Module& module, std::shared_ptr<AllGather> all_gather) {
  change_own_groups(module, [&](FsdpParamGroup& group) {
    change_comm(group, [&](CommOptions& comm) { comm.all_gather = all_gather; });
    group.forget_all_gathers();
  });
}

void set_custom_reduce_scatter(Module& module, std::shared_ptr<ReduceScatter> reduce_scatter) {
  change_own_groups(module, [&](FsdpParamGroup& group) {
    change_comm(group, [&](CommOptions& comm) { comm.reduce_scatter = reduce_scatter; });
  });
}

void set_allocate_memory_from_process_group(Module& module, bool allocate) {
  change_memory(module, allocate, GroupMemory::kRegistered);
}

void set_symm_mem_for_comm(Module& module, bool symmetric) {
  change_memory(module, symmetric, GroupMemory::kSymmetric);
}

void set_separate_reduce_scatter_group(Module& module, bool separate, bool recurse) {
  std::unordered_map<const ProcessGroup*, ProcessGroupPtr> made;  // by sharding group
  for_each_group(module, recurse, [&](const FsdpParamGroup& group) {
    if (const auto& own = group.comm.reduce_scatter_group) made.try_emplace(group.layout().shard_group.get(), own);
  });
  for_each_group(module, recurse, [&](FsdpParamGroup& group) {
    ProcessGroup& sharding = *group.layout().shard_group;
    ProcessGroupPtr& own = made[&sharding];
    if (separate && own == nullptr && sharding.size() > 1) {
      std::vector<int> members(sharding.size());
      std::iota(members.begin(), members.end(), 0);
      own = sharding.split(members, "reduce_scatter");
    }
    group.comm.reduce_scatter_group = separate ? own : nullptr;
  });
}

void set_reduce_scatter_max_input_buffers(Module& module, int buffers) {
  TORCH_CHECK_VALUE(buffers >= 1, "at least one reduce-scatter input must be allowed in flight, got ", buffers);
  size_t& max_reducing = context_of(module).comm->max_reducing;
  max_reducing = std::max(max_reducing, static_cast<size_t>(buffers));
}

void set_post_optim_event(Module& module, StreamEvent event) { context_of(module).post_optim_event = std::move(event); }

void share_comm_context(std::span<Module* const> roots) {
  TORCH_CHECK(!roots.empty(), "share_comm_context needs at least one module");
  const auto comm = std::make_shared<CommContext>(state_of(*roots[0]).device());
  for (auto* root : roots) state_of(*root).share_comm(comm);
}

void register_post_accumulate_grad_hook(const at::Tensor& parameter,
                                        std::function<void(const at::Tensor& parameter)> hook) {
  param_of(parameter, "register_post_accumulate_grad_hook").add_grad_hook(std::move(hook));
}

void set_all_gather_extension(const at::Tensor& parameter, std::shared_ptr<AllGatherExtension> extension) {
  FsdpParam& param = param_of(parameter, "set_all_gather_extension");
  param.group()->forget_all_gathers();
  param.set_extension(std::move(extension));
}

void set_schedule_observer(Module& module, std::function<void(const char*, const std::string&)> observer) {
  context_of(module).observer = std::move(observer);
}

}  // namespace megashard
