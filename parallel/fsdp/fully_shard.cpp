#include "parallel/fsdp/fully_shard.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
namespace {

using torch::nn::Module;

HookedModule& seam_of(Module& module) {
  auto* hooked = dynamic_cast<HookedModule*>(&module);
  const auto name = detail::demangled_class_name(typeid(module).name());
  const bool is_container =
      name.find("ModuleList") != std::string::npos || name.find("ModuleDict") != std::string::npos;
  TORCH_CHECK_VALUE(hooked != nullptr || !is_container, "fully_shard does not take containers without a forward (",
                    name, "): pass their modules");
  TORCH_CHECK_VALUE(hooked != nullptr, "fully_shard needs a module that runs hooks, and ", name,
                    " has none: make it a Hooked<", name,
                    "Impl> (parallel/fsdp/hooked_module.h), or derive a model from MultiModalModule");
  return *hooked;
}

struct Managed {
  std::vector<std::pair<std::string, at::Tensor>> parameters;  // by path from the given module; each tensor once
  std::vector<at::Tensor> buffers;
};

/// Collects parameters and buffers of a module and its submodules that no earlier call manages.
void collect(const std::string& path, const Module& module, const FullyShardOptions& options,
             std::unordered_set<const Module*>& visited, std::unordered_set<const c10::TensorImpl*>& seen,
             Managed& managed) {
  if (!visited.insert(&module).second) return;
  const std::string prefix = path.empty() ? "" : path + ".";
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    const at::Tensor& parameter = item.value();
    const bool ignored = std::any_of(options.ignored_parameters.begin(), options.ignored_parameters.end(),
                                     [&](const at::Tensor& each) { return each.is_same(parameter); });
    if (!parameter.defined() || ignored || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    managed.parameters.emplace_back(prefix + item.key(), parameter);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) managed.buffers.push_back(item.value());
  }
  for (const auto& item : module.named_children()) {
    if (fsdp_state(*item.value()) == nullptr) {
      collect(prefix + item.key(), *item.value(), options, visited, seen, managed);
    }
  }
}

/// True if the parameter's unit is a module around one of `modules`.
bool is_around(const FsdpParam& param, std::span<Module* const> modules) {
  for (const Module* outer : param.group()->state()->modules()) {
    for (const auto& inner : outer->modules(/*include_self=*/false)) {
      if (std::ranges::find(modules, inner.get()) != modules.end()) return true;
    }
  }
  return false;
}

void check_parameter(const std::string& name, const at::Tensor& parameter, std::span<Module* const> modules,
                     const MixedPrecisionPolicy& policy) {
  if (const auto* owner = find_fsdp_param(parameter)) {
    TORCH_CHECK_VALUE(!is_around(*owner, modules), "parameter '", name, "' is '", owner->name(),
                      "' of a module around this one, which fully_shard took before: call it on inner modules first, "
                      "and on the whole model last");
    TORCH_CHECK_VALUE(
        false, "parameters '", owner->name(), "' and '", name,
        "' are one tensor in two groups: tied weights must lie in one group (leave both ends to the root, or "
        "pass both modules to one fully_shard call), or be untied (\"tie_word_embeddings\": false in config.json, or "
        "for a network of flags --untie-embeddings-and-output-weights)");
  }
  TORCH_CHECK_VALUE(parameter.dim() > 0, "parameter '", name,
                    "' is a scalar: fully_shard needs a dimension to shard. Change '", name,
                    "' to a 1-D tensor with numel equal to 1");
  TORCH_CHECK_VALUE(parameter.is_contiguous(), "parameter '", name, "' is not contiguous (sizes ", parameter.sizes(),
                    ", strides ", parameter.strides(),
                    "): fully_shard needs contiguous parameters; assign a contiguous copy");
  TORCH_CHECK_VALUE(
      parameter.is_meta() || parameter.storage().use_count() == 1, "parameter '", name,
      "' shares its memory with another tensor (a view kept since construction, or a weight tied by set_data), which "
      "would go on using the unsharded values: drop the view, or tie by registering one tensor in both modules");
  TORCH_CHECK_VALUE(
      !parameter.grad().defined(), "parameter '", name,
      "' has a gradient already: call fully_shard before the first backward, and make the optimizer afterwards");
  TORCH_CHECK_VALUE(parameter.grad_dtype() || policy.grad_dtype || policy.reduce_dtype, "parameter '", name,
                    "' takes gradients of any dtype (set_grad_dtype without one), so a rank that does not use it "
                    "cannot tell theirs: set MixedPrecisionPolicy.reduce_dtype, which its gradients then have");
}

/// Moves a buffer to the mesh's device and casts it to buffer_dtype if set.
void place_buffer(const at::Tensor& buffer, const FullyShardOptions& options) {
  if (buffer.is_meta()) return;
  const bool casts = options.mixed_precision.buffer_dtype && buffer.is_floating_point();
  const auto dtype = casts ? *options.mixed_precision.buffer_dtype : buffer.scalar_type();
  const auto device = options.mesh->device();
  if (buffer.device() != device || buffer.scalar_type() != dtype) buffer.set_data(buffer.detach().to(device, dtype));
}

void check_reshard(ReshardAfterForward& reshard, int ranks) {
  if (reshard.kind != ReshardAfterForward::Kind::kTo) return;
  TORCH_CHECK_VALUE(reshard.ranks >= 1 && reshard.ranks <= ranks && ranks % reshard.ranks == 0,
                    "reshard_after_forward is ", reshard.ranks, ", which does not divide the ", ranks,
                    " ranks that shard the parameters");
  if (reshard.ranks == 1) {
    TORCH_WARN("reshard_after_forward=1 keeps the parameters gathered: the same as false");
    reshard = false;
  } else if (reshard.ranks == ranks) {
    reshard = true;
  }
}

void check_dtypes(const MixedPrecisionPolicy& policy) {
  const std::pair<const char*, std::optional<at::ScalarType>> fields[] = {{"param_dtype", policy.param_dtype},
                                                                          {"reduce_dtype", policy.reduce_dtype},
                                                                          {"output_dtype", policy.output_dtype},
                                                                          {"grad_dtype", policy.grad_dtype},
                                                                          {"buffer_dtype", policy.buffer_dtype}};
  for (const auto& [name, dtype] : fields) {
    TORCH_CHECK_VALUE(!dtype || at::isFloatingType(*dtype), "MixedPrecisionPolicy.", name, " is ", *dtype,
                      ", which is not a floating dtype: take bfloat16, float16 or float32");
  }
}

ShardLayout layout_of(const DeviceMeshPtr& shared) {
  const DeviceMesh& mesh = *shared;
  TORCH_CHECK_VALUE(mesh.ndim() == 1 || mesh.ndim() == 2, "fully_shard expects a 1-D or 2-D DeviceMesh, got ",
                    mesh.ndim(), "-D");
  TORCH_CHECK_VALUE(mesh.ndim() == 1 || mesh.dim_names().size() == 2, "HSDP needs a 2-D mesh with dimension names");
  if (mesh.ndim() == 1) return {shared, mesh.group(0), nullptr};
  return {shared, mesh.group(1), mesh.size(0) > 1 ? mesh.group(0) : nullptr};
}

/// The dimensions of `mesh` that FullyShardOptions::dp_mesh_dims names, as a 1-D or 2-D mesh.
DeviceMeshPtr data_parallel_mesh(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  TORCH_CHECK_VALUE(!dims.shard.empty() || !dims.replicate.empty(), "dp_mesh_dims names no dimension of the mesh ",
                    mesh.describe(), ": set shard, replicate or both");
  std::vector<std::string> all = dims.shard;
  all.insert(all.end(), dims.replicate.begin(), dims.replicate.end());
  std::ranges::sort(all);
  const auto twice = std::ranges::adjacent_find(all);
  TORCH_CHECK_VALUE(twice == all.end(), "dp_mesh_dims names dimension '", twice == all.end() ? "" : *twice, "' twice");
  ProcessGroupPtr shard = mesh.flatten(dims.shard);
  using Groups = std::vector<ProcessGroupPtr>;
  using Names = std::vector<std::string>;
  if (dims.replicate.empty()) return std::make_shared<const DeviceMesh>(Groups{std::move(shard)}, Names{"shard"});
  return std::make_shared<const DeviceMesh>(Groups{mesh.flatten(dims.replicate), std::move(shard)},
                                            Names{"replicate", "shard"});
}

/// Parameters of one mesh, which become a group.
struct MeshPart {
  FullyShardOptions options;
  ShardLayout layout;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

MeshPart part_of(const DeviceMeshPtr& mesh, FullyShardOptions options) {
  ShardLayout layout = layout_of(mesh);
  options.mesh = mesh;
  check_reshard(options.reshard_after_forward, layout.shard_group->size());
  return {std::move(options), std::move(layout), {}};
}

std::vector<MeshPart> split_by_mesh(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                    const FullyShardOptions& options) {
  std::vector<MeshPart> parts{part_of(options.mesh, options)};
  for (const auto& entry : parameters) {
    DeviceMeshPtr mesh = options.shard_placement_fn ? options.shard_placement_fn(entry.second).mesh : nullptr;
    if (mesh == nullptr) mesh = options.mesh;
    TORCH_CHECK_VALUE(mesh->device() == options.mesh->device(), "parameter '", entry.first, "' has a mesh of ",
                      mesh->device(), ", its module one of ", options.mesh->device(), ": they must be of one device");
    auto found =
        std::find_if(parts.begin(), parts.end(), [&](const MeshPart& part) { return part.layout.mesh == mesh; });
    if (found == parts.end()) found = parts.insert(parts.end(), part_of(mesh, options));
    check_tensor_parallel(entry.first, entry.second, *mesh);
    found->parameters.push_back(entry);
  }
  std::erase_if(parts, [](const MeshPart& part) { return part.parameters.empty(); });
  return parts;
}

}  // namespace

void fully_shard(Module& module, const FullyShardOptions& options) {
  Module* const one[] = {&module};
  fully_shard(std::span<Module* const>(one), options);
}

void fully_shard(Module& module, const ProcessGroupPtr& group, FullyShardOptions options) {
  options.mesh = std::make_shared<const DeviceMesh>(std::vector<ProcessGroupPtr>{group}, std::vector<std::string>{});
  fully_shard(module, options);
}

void fully_shard(std::span<Module* const> modules, const FullyShardOptions& given) {
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard needs at least one module");
  TORCH_CHECK_VALUE(given.mesh != nullptr, "fully_shard needs options.mesh, a 1-D or 2-D DeviceMesh");
  FullyShardOptions options = given;
  if (options.dp_mesh_dims) options.mesh = data_parallel_mesh(*options.mesh, *options.dp_mesh_dims);
  check_dtypes(options.mixed_precision);
  Managed managed;
  std::unordered_set<const Module*> visited;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < modules.size(); ++i) {
    TORCH_CHECK_VALUE(seam_of(*modules[i]).forward_hooks() == nullptr, "fully_shard was applied twice to a ",
                      seam_of(*modules[i]).class_name());
    collect(modules.size() == 1 ? "" : std::to_string(i), *modules[i], options, visited, seen, managed);
  }
  for (const auto& [name, parameter] : managed.parameters)
    check_parameter(name, parameter, modules, options.mixed_precision);
  const auto parts = split_by_mesh(managed.parameters, options);  // throws before anything changes

  const auto state = std::make_shared<FsdpState>(std::vector<Module*>(modules.begin(), modules.end()),
                                                 options.mixed_precision, options.mesh->device());
  for (const auto& part : parts)
    state->add_group(std::make_unique<FsdpParamGroup>(part.parameters, part.layout, part.options));
  for (const auto& buffer : managed.buffers) place_buffer(buffer, options);
  state->register_hooks();
}

int64_t leading_dims_for(at::IntArrayRef sizes, int ranks) {
  if (sizes[0] % ranks == 0) return 1;
  for (int64_t leading = 2; leading < static_cast<int64_t>(sizes.size()); ++leading) {
    if (ShardGeometry::of_leading(sizes.vec(), leading, ranks)) return leading;
  }
  return 1;
}

bool is_sharded(const at::Tensor& parameter) { return find_fsdp_param(parameter) != nullptr; }
bool is_fsdp_module(const Module& module) { return fsdp_state(module) != nullptr; }

ShardedTensor reshard_and_view(const at::Tensor& parameter) {
  auto* param = find_fsdp_param(parameter);
  if (param == nullptr) return unsharded_view(parameter);
  param->group()->reshard_if_idle();
  if (!param->is_unsharded()) param->reset_sharded_param();
  return param->sharded_tensor();
}

std::vector<ProcessGroupPtr> sharding_groups_of(const at::Tensor& parameter) {
  const auto* param = find_fsdp_param(parameter);
  return param == nullptr ? sharding_groups(unsharded_view(parameter)) : param->sharding_groups();
}

std::vector<int64_t> global_sizes(const at::Tensor& parameter) {
  const auto* param = find_fsdp_param(parameter);
  return (param == nullptr ? unsharded_view(parameter) : param->sharded_tensor()).global_sizes;
}

void assign_full_parameter(const at::Tensor& parameter, const at::Tensor& whole) {
  auto* param = find_fsdp_param(parameter);
  if (const auto layouts = tensor_parallel_layouts(parameter); param == nullptr && !layouts.empty()) {
    const c10::NoGradGuard no_grad;
    parameter.detach().copy_(tensor_parallel_slice(whole.detach(), parameter.sizes(), layouts));
    return;
  }
  TORCH_CHECK_VALUE(param != nullptr,
                    "assign_full_parameter needs a parameter under fully_shard, or a tensor-parallel one");
  param->group()->reshard_if_idle();
  param->assign_full(whole);
}

void materialise_empty_parameter(const at::Tensor& parameter, c10::Device device) {
  auto* param = find_fsdp_param(parameter);
  TORCH_CHECK_VALUE(param != nullptr, "materialise_empty_parameter needs a parameter under fully_shard");
  if (param->is_meta()) param->materialise_empty(device);
}

bool is_unsharded_storage(const c10::StorageImpl* storage) { return UnshardedStorage::any_owns(storage); }

}  // namespace megashard
