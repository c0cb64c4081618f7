// FsdpState's role as a root: it finds the units under it, which then share its context.

#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "parallel/fsdp/detail/fsdp_param.h"
#include "parallel/fsdp/detail/fsdp_state.h"

namespace megashard {

void FsdpState::name_group(size_t index) { groups_[index]->set_name(index == 0 ? name_ : c10::str(name_, "#", index)); }

FsdpContext& FsdpState::ensure_context() {
  if (context_ == nullptr) {
    if (comm_ == nullptr) comm_ = std::make_shared<CommContext>(mesh_device_);
    context_ = std::make_shared<FsdpContext>(comm_);
    context_->states.push_back(this);
    provisional_ = true;
    // New streams; no root's forward has ordered them after the weights' writes.
    const CommStreams& streams = context_->streams();
    if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);
  }
  return *context_;
}

void FsdpState::lazy_init() {
  if (context_ != nullptr && !provisional_) return;
  TORCH_CHECK(modules_.size() == 1, "the root of fully_shard must be one module: call fully_shard on the whole model "
                                    "last, or run forward through it");
  if (comm_ == nullptr) comm_ = std::make_shared<CommContext>(mesh_device_);
  adopt_units(std::make_shared<FsdpContext>(comm_));
}

void FsdpState::adopt_units() {
  if (context_ == nullptr || provisional_) return;
  context_->states.clear();
  context_->post_forward_order.clear();
  adopt_units(context_);
}

void FsdpState::adopt_units(const std::shared_ptr<FsdpContext>& context) {
  torch::nn::Module& root = *modules_[0];
  std::unordered_set<const FsdpState*> seen;
  auto adopt = [&](const std::string& path, const torch::nn::Module& module) {
    const auto state = fsdp_state(module);
    if (state == nullptr || !seen.insert(state.get()).second) return;
    const bool belongs_elsewhere = state->context_ != nullptr && state->context_ != context && !state->provisional_;
    TORCH_CHECK(!belongs_elsewhere, "module '", path,
                "' ran forward on its own before its root did: run forward through the root module first");
    state->name_ = path;
    context->states.push_back(state.get());
  };
  adopt(name_, root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) adopt(item.key(), *item.value());
  for (auto* state : context->states) {
    if (std::exchange(state->provisional_, false)) context->take_settings(*state->context_);
    state->context_ = context;
    for (const auto& group : state->groups_) group->move_to(context);
  }
  name_parameters(root);
  for (const auto& group : groups_) group->set_of_root();
}

void FsdpState::name_parameters(const torch::nn::Module& root) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : root.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (auto* state : context_->states) {
    for (size_t i = 0; i < state->groups_.size(); ++i) {
      state->name_group(i);
      for (const auto& param : state->groups_[i]->params()) {
        const auto found = names.find(param->parameter().unsafeGetTensorImpl());
        if (found != names.end()) param->set_name(found->second);
      }
    }
  }
}

}  // namespace megashard
