#include "framework/modules/fsdp2_mixin.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_set>

#include "framework/mistakes.h"
#include "framework/modules/fsdp2_controls.h"
#include "framework/modules/sharding_checks.h"
#include "framework/modules/wrap_policy.h"
#include "parallel/collectives/device_mesh.h"

namespace megashard {
namespace {

/// Modules under `root` in pre-order with their paths.
std::vector<NamedModule> in_tree_order(const torch::nn::Module& root, const std::vector<NamedModule>& some) {
  std::vector<NamedModule> ordered;
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    const auto found = std::find_if(some.begin(), some.end(),
                                    [&](const NamedModule& each) { return each.module == item.value().get(); });
    if (found != some.end()) ordered.push_back(*found);
  }
  return ordered;
}

/// Reason why all ranks form one shard group.
std::string why_all(const Fsdp2Config& config) {
  if (config.wrap_policy) return "fsdp_size is 1 or less, absent, or all ranks, as in ROLL";
  return key_in_file(config, "sharding_size") + " is auto, null or absent; 1 would replicate";
}

}  // namespace

torch::nn::Module& FSDP2Mixin::module() {
  auto* self = dynamic_cast<torch::nn::Module*>(this);
  TORCH_CHECK(self != nullptr,
              "FSDP2Mixin is mixed into a class that is no torch::nn::Module: derive from MultiModalModule");
  return *self;
}

void FSDP2Mixin::fully_shard(ShardingRequest request) {
  translate_patterns(module(), other_paths(), request.config, request.sink);
  check_patterns(module(), request.config, request.strictness);
  _pre_fully_shard(std::move(request));
  _init_tp_model();
  _init_ep_model();
  check_moe_modules();
  check_ignored_modules();
  set_shard_placements();
  value_errors_are_mistakes([this] { _fully_shard(); });
  const auto& config = request_.config;
  const bool on_cpu = options_.mesh->device().is_cpu();
  detail::warn_of_whole_parameters(module(), options_.ignored_parameters, request_.sink);
  detail::check_output_dtype(module(), in_tree_order(module(), wrapped_), options_.mixed_precision);
  if (on_cpu) detail::check_batch_norms(module(), options_.mixed_precision);
  detail::set_communication(module(), config, on_cpu);
  detail::gather_in_fp8(module(), config, select(config.fp8_all_gather_modules, "fp8_all_gather_modules"),
                        request_.sink);
  if (request_.unit_plan) detail::regroup(module(), *request_.unit_plan);
  _post_fully_shard();
  make_copies_equal();
}

void FSDP2Mixin::store_in(at::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  const auto store = [&](const std::string& name, at::Tensor& tensor) {
    if (tensor.is_floating_point() && !keeps_fp32(name)) tensor.set_data(tensor.to(dtype));
  };
  for (auto& item : module().named_parameters()) store(item.key(), item.value());
  for (auto& item : module().named_buffers()) store(item.key(), item.value());
}

void FSDP2Mixin::_pre_fully_shard(ShardingRequest request) {
  request_ = std::move(request);
  const Fsdp2Config& config = request_.config;
  const auto& group = request_.process_group;
  detail::warn_of_keys_without_effect(config, group->device_type() == c10::kCPU, request_.sink);
  const int shard = shard_group_size(config, group->size());
  detail::check_reshard(config, shard);
  const int replicas = group->size() / shard;
  options_ = {};
  options_.mesh = replicas == 1
                      ? std::make_shared<DeviceMesh>(group, std::vector<int>{shard}, std::vector<std::string>{"Shard"})
                      : std::make_shared<DeviceMesh>(group, std::vector<int>{replicas, shard},
                                                     std::vector<std::string>{"Replicate", "Shard"});
  options_.reshard_after_forward = config.reshard_after_forward;
  options_.mixed_precision = config.mixed_precision;
  options_.unused_parameters = config.unused_parameters;
  placements_ = detail::ShardPlacements(options_.mesh);
  if (config.offload_to_cpu) options_.cpu_offload = CpuOffloadPolicy{.pin_memory = config.pin_memory};
  if (request_.sink) {
    request_.sink(Severity::kNotice, "FSDP2: parameters are sharded over " + std::to_string(shard) + " ranks" +
                                         (replicas > 1 ? ", " + std::to_string(replicas) + " replicas" : "") +
                                         (config.sharding_size ? "" : " (all of them: " + why_all(config) + ")"));
  }
  for (const auto& ignored : select(config.ignored_modules, "ignored_modules")) {
    for (auto& parameter : ignored.module->parameters()) {
      const auto device = options_.mesh->device();  // fully_shard will not move it
      if (!parameter.is_meta() && parameter.device() != device) parameter.set_data(parameter.detach().to(device));
      options_.ignored_parameters.push_back(parameter);
    }
  }
}

void FSDP2Mixin::_init_tp_model() {
  if (request_.tensor_parallel_group == nullptr) return;
  throw UsageError("--tensor-model-parallel-size " + std::to_string(request_.tensor_parallel_group->size()) +
                   ": this model has no tensor-parallel layers; leave it out, and FSDP2 shards the model over all "
                   "ranks.");
}

void FSDP2Mixin::_init_ep_model() {
  TORCH_CHECK(request_.config.expert_parallel_size == 1, "expert_parallel_size is ",
              request_.config.expert_parallel_size,
              " in the FSDP2 file, but this model has no experts to spread; set it to 1");
}

void FSDP2Mixin::shard_over(DeviceMeshPtr mesh, std::function<bool(const at::Tensor& parameter)> which) {
  placements_.set_other_mesh(std::move(mesh), std::move(which));
}

void FSDP2Mixin::set_shard_placements() {
  const auto& rule = request_.config.shard_placement;
  if (rule.divisible) placements_.cut_where_divisible();
  for (const auto& [pattern, dim] : rule.dims) {
    for (const auto& each : select({pattern}, "shard_placement")) placements_.cut(*each.module, dim);
  }
  const auto& ignored = options_.ignored_parameters;
  for (const auto& item : module().named_parameters()) {
    if (std::ranges::none_of(ignored, [&](const at::Tensor& each) { return each.is_same(item.value()); }))
      placements_.check(item.key(), item.value());
  }
  std::unordered_set<const c10::TensorImpl*> in_fp32;
  for (const auto& item : module().named_parameters()) {
    if (keeps_fp32(item.key())) in_fp32.insert(item.value().unsafeGetTensorImpl());
  }
  if (!in_fp32.empty()) {
    options_.param_dtype_override_fn = [in_fp32](const at::Tensor& parameter) {
      return in_fp32.contains(parameter.unsafeGetTensorImpl()) ? std::optional(at::kFloat) : std::nullopt;
    };
  }
  placements_.set_stacks(stacked_parameters());
  if (placements_.has_other_mesh() || placements_.has_stacks() || rule.divisible || !rule.dims.empty())
    options_.shard_placement_fn = placements_;
}

void FSDP2Mixin::check_moe_modules() {
  const auto& patterns = request_.config.moe_modules;
  const auto parameters = module().parameters();
  const bool has_experts = std::any_of(parameters.begin(), parameters.end(), [this](const at::Tensor& parameter) {
    return placements_.is_on_other_mesh(parameter);
  });
  if (request_.config.expert_shard_size && !has_experts && request_.sink) {
    request_.sink(Severity::kWarning, "FSDP2: expert_fully_shard_parallel_size has no effect: this model has no "
                                      "experts; leave it out");
  }
  if (patterns.empty()) return;
  if (!placements_.has_other_mesh()) {
    if (request_.sink) {
      request_.sink(Severity::kWarning, "FSDP2: moe_modules has no effect: it names the experts that are spread over "
                                        "ranks, and expert_parallel_size is 1");
    }
    return;
  }
  std::unordered_set<const c10::TensorImpl*> named;
  for (const auto& each : select(patterns, "moe_modules")) {
    for (const auto& parameter : each.module->parameters()) {
      require(placements_.is_on_other_mesh(parameter), "moe_modules names " + each.path +
                                                           ", which is more than experts; name their module, as "
                                                           "in model.layers.{*}.mlp.experts.");
      named.insert(parameter.unsafeGetTensorImpl());
    }
  }
  for (const auto& item : module().named_parameters()) {
    require(named.contains(item.value().unsafeGetTensorImpl()) || !placements_.is_on_other_mesh(item.value()),
            "moe_modules leaves out " + item.key() +
                ", but all experts of the model are spread over the ranks; name the experts "
                "of all layers, or leave moe_modules out.");
  }
}

void FSDP2Mixin::check_ignored_modules() {
  std::unordered_set<const c10::TensorImpl*> left;
  for (const auto& each : options_.ignored_parameters) left.insert(each.unsafeGetTensorImpl());
  detail::NamedParameters ignored;
  for (const auto& item : module().named_parameters()) {
    if (left.erase(item.value().unsafeGetTensorImpl()) == 0) continue;  // tied parameters appear once
    require(!placements_.is_on_other_mesh(item.value()),
            "ignored_modules names " + item.key() +
                " of an expert, but experts are spread over the ranks; leave them out of it.");
    ignored.emplace_back(item.key(), item.value());
  }
  const int ranks = request_.trains ? request_.process_group->size() : 1;
  detail::check_ignored_parameters(ignored, request_.config, ranks, request_.sink);
}

void FSDP2Mixin::make_copies_equal() {
  if (request_.weights_follow) return;
  const c10::NoGradGuard no_grad;
  const auto take_first = [](const at::Tensor& values, ProcessGroup& group) {
    if (values.is_meta()) return;
    const at::Tensor first = values.contiguous();
    group.broadcast(first, 0).wait();
    if (!first.is_same(values)) values.copy_(first);
  };
  for (const at::Tensor& parameter : module().parameters()) {
    const ShardedTensor view = reshard_and_view(parameter);
    if (!is_sharded(parameter) && view.is_replicated()) take_first(parameter.detach(), *request_.process_group);
    const bool has_replicas =
        !view.is_replicated() && view.mesh->ndim() > 1 && view.placements[0] == Placement::replicate();
    if (has_replicas) take_first(view.local.detach(), *view.mesh->group(0));
  }
  for (const at::Tensor& buffer : module().buffers()) take_first(buffer, *request_.process_group);
}

void FSDP2Mixin::_fully_shard() {
  set_recompute_modules_to_wrap();
  set_activation_offload();
  set_fullyshard_modules_to_wrap();
  shard_root();
  set_modules_to_prefetch(request_.config.num_to_forward_prefetch, request_.config.num_to_backward_prefetch);
}

FullyShardOptions FSDP2Mixin::options_for(const NamedModule& each) const {
  auto options = options_;
  auto& cast = options.mixed_precision.cast_forward_inputs;
  cast = cast_forward_inputs(each).value_or(cast);
  return options;
}

void FSDP2Mixin::shard_root() {
  if (!is_fsdp_module(module())) megashard::fully_shard(module(), options_for({"", &module()}));
}

void FSDP2Mixin::_post_fully_shard() {
  if (request_.init_tape == nullptr) return;
  const c10::Device device = options_.mesh->device();
  const auto assign = [device](const std::string&, at::Tensor& target, const at::Tensor& full) {
    if (is_sharded(target)) {
      assign_full_parameter(target, full);
    } else {
      become(target, full.to(device));
    }
  };
  InitTape::Options replay;
  replay.parameters = !request_.weights_follow;
  replay.allow_unset = request_.unset_weights_follow;
  request_.init_tape->materialise(module(), assign, replay);
  if (request_.weights_follow) to_empty_if_needed(device);
  post_meta_init();
}

void FSDP2Mixin::to_empty_if_needed(c10::Device device) {
  for (auto& parameter : module().parameters()) {
    if (!parameter.is_meta()) continue;
    if (is_sharded(parameter)) {
      materialise_empty_parameter(parameter, device);
    } else {
      become(parameter, at::empty(parameter.sizes(), parameter.options().device(device).requires_grad(false)));
    }
  }
}

std::vector<NamedModule> FSDP2Mixin::select(const std::vector<std::string>& patterns, const std::string& key) {
  if (patterns.empty()) return {};
  const std::string name = key_in_file(request_.config, key);
  const auto chosen = request_.config.native_patterns ? select_modules_natively : select_modules;
  const auto selection = chosen(module(), patterns, name, request_.strictness, request_.sink);
  for (const auto& match : selection.matches) {
    if (request_.sink) request_.sink(Severity::kNotice, "FSDP2: " + name + ": " + describe_match(match));
  }
  return selection.modules;
}

void FSDP2Mixin::set_fullyshard_modules_to_wrap() {
  const auto& policy = request_.config.wrap_policy;
  if (!policy) {
    shard_matching(request_.config.sub_modules_to_wrap.value_or(default_modules_to_wrap()));
    return shard_root();
  }
  const auto layers = policy->layer_classes ? select_classes(module(), *policy->layer_classes,
                                                             "transformer_layer_cls_to_wrap", request_.sink)
                                            : select(default_modules_to_wrap(), "the model's layers");
  auto groups = modules_of_policy(module(), *policy, layers, request_.sink);
  for (const auto& each : experts_of_policy(module(), policy->expert_classes, request_.sink)) {
    std::erase_if(groups, [&](const NamedModule& other) { return other.module == each.module; });
    groups.push_back(each);
  }
  shard_modules(groups);
  shard_root();
}

void FSDP2Mixin::shard_matching(const std::vector<std::string>& patterns) {
  auto modules = select(patterns, "sub_modules_to_wrap");
  leave_out_tied(modules, key_in_file(request_.config, "sub_modules_to_wrap"), request_.sink);
  shard_modules(modules);
}

void FSDP2Mixin::shard_modules(const std::vector<NamedModule>& modules) {
  const auto ordered = in_tree_order(module(), modules);
  wrapped_.insert(wrapped_.end(), ordered.begin(), ordered.end());
  // Reverse pre-order has children before their parents.
  for (auto each = ordered.rbegin(); each != ordered.rend(); ++each) {
    detail::hooked_module(*each, key_in_file(request_.config, "sub_modules_to_wrap"));
    megashard::fully_shard(*each->module, options_for(*each));
  }
}

void FSDP2Mixin::set_modules_to_prefetch(int forward, int backward) {
  const auto modules = module().named_modules("", /*include_self=*/false);
  std::vector<torch::nn::Module*> units;  // the first module of each unit
  for (const auto& unit : unit_plan_of(module()).units) units.push_back(modules[unit.front()].get());
  const auto count = static_cast<int>(units.size());
  for (int i = 0; i < count; ++i) {
    std::vector<torch::nn::Module*> next, previous;
    for (int step = 1; step <= forward && i + step < count; ++step) next.push_back(units[i + step]);
    for (int step = 1; step <= backward && i - step >= 0; ++step) previous.push_back(units[i - step]);
    if (!next.empty()) set_modules_to_forward_prefetch(*units[i], next);
    if (!previous.empty()) set_modules_to_backward_prefetch(*units[i], previous);
  }
}

}  // namespace megashard
