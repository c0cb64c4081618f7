#include "parallel/fsdp/unit_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "parallel/fsdp/detail/fsdp_state.h"

namespace megashard {
namespace {

using torch::nn::Module;
using StatePtr = std::shared_ptr<FsdpState>;

StatePtr root_state(const Module& root) {
  auto state = fsdp_state(root);
  TORCH_CHECK(state != nullptr, "a plan of units is for a model under fully_shard, which this ",
              detail::demangled_class_name(typeid(root).name()), " is not");
  return state;
}

/// Path and module of everything under the root, in tree order; shared modules once.
std::vector<std::pair<std::string, Module*>> modules_under(const Module& root) {
  std::vector<std::pair<std::string, Module*>> modules;
  std::unordered_set<const Module*> seen;
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (seen.insert(item.value().get()).second) modules.emplace_back(item.key(), item.value().get());
  }
  return modules;
}

/// Replaces the current grouping by a plan's.
class Regrouping {
 public:
  Regrouping(Module& root, const UnitPlan& plan) : root_(root), root_state_(root_state(root)) {
    find_old_states();
    check_idle();
    for (const auto& paths : plan.units) add_unit(paths);
    find_kept_casts();
    assign_parameters(root_, /*unit=*/nullptr);
  }

  void apply(const UnitPlan& plan) {
    dissolve();
    for (auto& unit : units_) make_state(unit);
    add_groups(*root_state_, root_params_);
    root_state_->adopt_units();
    set_prefetch(plan.forward_prefetch, &FsdpState::forward_prefetch, 1);
    set_prefetch(plan.backward_prefetch, &FsdpState::backward_prefetch, -1);
  }

 private:
  struct NewUnit {
    std::vector<Module*> modules;
    StatePtr like;  // former unit of its first module, or around it
    bool was_unit;  // its first module was a unit itself
    std::vector<const c10::TensorImpl*> params;
    StatePtr state;
  };

  void find_old_states() {
    old_states_.push_back(root_state_);
    for (const auto& [path, module] : modules_under(root_)) {
      by_path_.emplace(path, module);
      const auto state = fsdp_state(*module);
      if (state != nullptr && std::find(old_states_.begin(), old_states_.end(), state) == old_states_.end())
        old_states_.push_back(state);
    }
  }

  void check_idle() const {
    const FsdpContext* context = root_state_->context();
    const bool idle = context == nullptr || (context->idle() && context->comm->reducing.empty());
    TORCH_CHECK(idle, "units are regrouped between steps, and forward or backward is running");
    for (const auto& state : old_states_) {
      for (const auto& group : state->groups()) {
        TORCH_CHECK(!group->has_pending_grads(), "units are regrouped between steps, and gradients of '", group->name(),
                    "' wait for their reduction");
      }
    }
  }

  void add_unit(const UnitPlan::Unit& paths) {
    TORCH_CHECK_VALUE(!paths.empty(), "a unit of the plan has no modules");
    NewUnit unit;
    for (const auto& path : paths) {
      const auto found = by_path_.find(path);
      TORCH_CHECK_VALUE(found != by_path_.end(), "the plan names '", path, "', and the model has no such module");
      Module& module = *found->second;
      TORCH_CHECK_VALUE(dynamic_cast<HookedModule*>(&module) != nullptr, "the plan names '", path,
                        "', which runs no hooks and cannot be a unit: name a layer, or a Hooked<M>");
      TORCH_CHECK_VALUE(listed_.emplace(&module, units_.size()).second, "the plan names '", path, "' twice");
      const auto [old, was_unit] = old_state_of(path);
      if (unit.modules.empty()) {
        unit.like = old;
        unit.was_unit = was_unit;
      }
      TORCH_CHECK_VALUE(was_unit == unit.was_unit && old->policy() == unit.like->policy(), "the plan has '", paths[0],
                        "' and '", path, "' in one unit, whose inputs or outputs are cast to other dtypes");
      unit.modules.push_back(&module);
    }
    units_.push_back(std::move(unit));
  }

  /// State of the module itself (true) or of the nearest module around it (false).
  std::pair<StatePtr, bool> old_state_of(std::string path) const {
    if (auto own = fsdp_state(*by_path_.at(path))) return {own, true};
    for (size_t dot = path.rfind('.'); dot != std::string::npos; dot = path.rfind('.')) {
      path.resize(dot);
      if (auto around = fsdp_state(*by_path_.at(path))) return {around, false};
    }
    return {root_state_, false};
  }

  /// Former units that the plan does not list but that still cast.
  void find_kept_casts() {
    for (const auto& state : old_states_) {
      if (state == root_state_ || !state->casts()) continue;
      for (auto* module : state->modules()) {
        if (listed_.contains(module)) continue;
        units_.push_back({.modules = {module}, .like = state, .was_unit = true, .params = {}, .state = nullptr});
      }
    }
  }

  void assign_parameters(const Module& module, NewUnit* unit) {
    if (!visited_.insert(&module).second) return;
    if (const auto found = listed_.find(&module); found != listed_.end()) unit = &units_[found->second];
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto* impl = item.value().unsafeGetTensorImpl();
      if (find_fsdp_param(item.value()) == nullptr) continue;  // ignored by fully_shard
      const auto [place, is_first] = unit_of_.emplace(impl, unit);
      TORCH_CHECK_VALUE(place->second == unit, "the plan has a weight in two units, '", item.key(), "' of ",
                        detail::demangled_class_name(typeid(module).name()),
                        ", which is tied: leave both ends to the root");
      if (is_first) (unit == nullptr ? root_params_ : unit->params).push_back(impl);
    }
    for (const auto& item : module.named_children()) assign_parameters(*item.value(), unit);
  }

  void dissolve() {
    for (const auto& state : old_states_) {
      state->reshard();
      if (state != root_state_) {
        for (auto* module : state->modules()) dynamic_cast<HookedModule&>(*module).set_forward_hooks(nullptr);
        // Settings made by controls before the root's first forward.
        if (auto* context = state->context(); context != nullptr && context != root_state_->context())
          root_state_->ensure_context().take_settings(*context);
      }
      for (auto& group : state->take_groups()) {
        for (auto& param : group->take_params()) {
          const auto* impl = param->parameter().unsafeGetTensorImpl();
          pool_.emplace(impl, std::make_pair(std::move(param), group.get()));
        }
        old_groups_.push_back(std::move(group));
      }
    }
  }

  void make_state(NewUnit& unit) {
    unit.state = unit.was_unit ? std::make_shared<FsdpState>(unit.modules, unit.like->policy(), unit.like->device())
                               : std::make_shared<FsdpState>(unit.modules, without_casts(unit.like->policy()),
                                                             unit.like->device());
    add_groups(*unit.state, unit.params);
    unit.state->register_hooks();
  }

  static MixedPrecisionPolicy without_casts(MixedPrecisionPolicy policy) {
    policy.cast_forward_inputs = false;
    policy.output_dtype.reset();
    return policy;
  }

  /// Adds one group per mesh and policy, in parameter order.
  void add_groups(FsdpState& state, const std::vector<const c10::TensorImpl*>& params) {
    std::vector<std::pair<const FsdpParamGroup*, FsdpParams>> parts;
    for (const auto* impl : params) {
      auto& [param, old] = pool_.at(impl);
      const auto alike = [&](const auto& part) {
        return part.first->layout().mesh == old->layout().mesh && part.first->policy() == old->policy();
      };
      auto found = std::find_if(parts.begin(), parts.end(), alike);
      if (found == parts.end()) found = parts.insert(parts.end(), {old, FsdpParams()});
      found->second.push_back(std::move(param));
    }
    for (auto& [like, members] : parts) state.add_group(std::make_unique<FsdpParamGroup>(std::move(members), *like));
  }

  using Prefetch = std::vector<std::weak_ptr<FsdpState>> FsdpState::*;
  void set_prefetch(int count, Prefetch list, int direction) {
    const auto units = static_cast<int>(listed_units());
    for (int i = 0; i < units; ++i) {
      for (int step = 1; step <= count; ++step) {
        const int other = i + direction * step;
        if (other >= 0 && other < units) ((*units_[i].state).*list).push_back(units_[other].state);
      }
    }
  }
  size_t listed_units() const {
    return static_cast<size_t>(std::count_if(units_.begin(), units_.end(),
                                             [&](const NewUnit& unit) { return listed_.contains(unit.modules[0]); }));
  }

  Module& root_;
  StatePtr root_state_;
  std::vector<StatePtr> old_states_;  // the root's is the first
  std::map<std::string, Module*> by_path_;
  std::vector<NewUnit> units_;  // the plan's, then units that only cast
  std::unordered_map<const Module*, size_t> listed_;
  std::unordered_set<const Module*> visited_;
  std::unordered_map<const c10::TensorImpl*, const NewUnit*> unit_of_;
  std::vector<const c10::TensorImpl*> root_params_;
  std::unordered_map<const c10::TensorImpl*, std::pair<std::unique_ptr<FsdpParam>, const FsdpParamGroup*>> pool_;
  std::vector<std::unique_ptr<FsdpParamGroup>> old_groups_;
};

}  // namespace

UnitPlan unit_plan_of(const Module& root) {
  const auto of_root = fsdp_state(root);
  UnitPlan plan;
  std::unordered_map<const FsdpState*, size_t> places;
  size_t forward = 0, backward = 0;
  for (const auto& [path, module] : modules_under(root)) {
    const auto state = fsdp_state(*module);
    if (state == nullptr || state == of_root || state->groups().empty()) continue;
    const auto [place, is_first] = places.emplace(state.get(), plan.units.size());
    if (is_first) plan.units.emplace_back();
    plan.units[place->second].push_back(path);
    forward = std::max(forward, state->forward_prefetch.size());
    backward = std::max(backward, state->backward_prefetch.size());
  }
  plan.forward_prefetch = static_cast<int>(forward);
  plan.backward_prefetch = static_cast<int>(backward);
  return plan;
}

void apply_unit_plan(Module& root, const UnitPlan& plan) { Regrouping(root, plan).apply(plan); }

}  // namespace megashard
