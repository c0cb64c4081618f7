#include "parallel/fsdp/detail/fsdp_param.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "parallel/copies/element_copy.h"
#include "parallel/device/device_plan.h"
#include "parallel/device/storage.h"
#include "parallel/fsdp/detail/fsdp_param_group.h"
#include "parallel/guarded_tensor.h"

namespace megashard {
namespace {

std::string sizes_text(at::IntArrayRef sizes) { return c10::str(sizes); }

ShardGeometry geometry_of(const at::Tensor& parameter, const std::string& name, const ShardPlacement& placement,
                          int ranks) {
  const auto sizes = parameter.sizes().vec();
  const int64_t leading = placement.leading_dims;
  TORCH_CHECK_VALUE(1 <= leading && leading <= parameter.dim(), "shard_placement_fn cuts ", leading,
                    " leading dimensions of parameter '", name, "', which has ", parameter.dim(),
                    " dimension(s): give a number between 1 and that");
  if (leading > 1) {
    TORCH_CHECK_VALUE(placement.dim == 0, "parameter '", name, "' is to be sharded along its first ", leading,
                      " dimensions and along dimension ", placement.dim,
                      ": shard_placement_fn must give dim 0 where it gives more than 1 of leading_dims");
    auto geometry = ShardGeometry::of_leading(sizes, leading, ranks);
    TORCH_CHECK_VALUE(geometry.has_value(), "parameter '", name, "' of sizes ", parameter.sizes(),
                      " cannot be sharded along its first ", leading, " dimensions over ", ranks,
                      " ranks: each rank must get whole slices of one of them, or an equal part of one slice");
    return *std::move(geometry);
  }
  const int64_t dim = placement.dim < 0 ? placement.dim + parameter.dim() : placement.dim;
  TORCH_CHECK_VALUE(0 <= dim && dim < parameter.dim(), "shard dimension ", placement.dim, " of parameter '", name,
                    "' is invalid: it has ", parameter.dim(), " dimension(s)");
  TORCH_CHECK_NOT_IMPLEMENTED(dim == 0 || parameter.size(dim) % ranks == 0, "parameter '", name, "' of sizes ",
                              parameter.sizes(), " cannot be sharded on dimension ", dim, " over ", ranks,
                              " ranks: only dimension 0 may be uneven");
  return {sizes, dim, ranks};
}

/// True after Tensor::set_grad_dtype, even with the tensor's own dtype or none.
bool sets_grad_dtype(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && (meta->grad_dtype_ || meta->allow_grad_dtype_mismatch_);
}

/// True if gradients are reduced in a wider dtype than they are kept in, so that backward must not round them to that.
bool reduces_wider(const MixedPrecisionPolicy& policy, at::ScalarType stored) {
  return at::isFloatingType(stored) && policy.grad_dtype && policy.reduce_dtype &&
         policy.grad_dtype != policy.reduce_dtype &&
         c10::promoteTypes(*policy.grad_dtype, *policy.reduce_dtype) == *policy.reduce_dtype;
}

size_t unsharded_bytes(const FsdpParam* param) { return param->unsharded().tensor().nbytes(); }

/// End of the run of `set` from `first` on that can be adjacent. Null entries belong to another unit.
size_t end_of_run(const std::vector<FsdpParam*>& set, size_t first) {
  constexpr size_t kAlignment = 64;  // of each weight, as of all LibTorch memory
  size_t end = first;
  const auto follows = [&](const FsdpParam* param) {
    return param != nullptr && param->compute_dtype() == set[first]->compute_dtype() &&
           (end == first || unsharded_bytes(set[end - 1]) % kAlignment == 0);
  };
  while (end < set.size() && follows(set[end])) ++end;
  return end;
}

void share_memory(std::span<FsdpParam* const> run) {
  size_t bytes = 0;
  for (const auto* param : run) bytes += unsharded_bytes(param);
  const auto& storage = run.front()->unsharded().tensor().storage();
  const auto memory = c10::make_intrusive<AdjacentMemory>(bytes, storage.allocator());
  size_t offset = 0;
  for (auto* param : run) {
    param->unsharded().lie_in(memory, offset);
    offset += unsharded_bytes(param);
  }
}

}  // namespace

void place_adjacent(const FsdpParams& params) {
  std::map<int64_t, std::vector<FsdpParam*>> sets;
  for (const auto& param : params) {
    const auto place =
        ParameterRecords::all().read(param->parameter(), [](const auto& record) { return record.adjacent; });
    if (!place || param->aliases_sharded_param()) continue;
    auto& set = sets[place->set];
    set.resize(place->count);
    set[place->index] = param.get();
  }
  for (const auto& [_, set] : sets) {
    for (size_t first = 0; first < set.size();) {
      const size_t end = end_of_run(set, first);
      if (end > first + 1) share_memory(std::span(set).subspan(first, end - first));
      first = std::max(end, first + 1);
    }
  }
}

FsdpParam* find_fsdp_param(const at::Tensor& parameter) {
  return ParameterRecords::all().read(parameter, [](const auto& record) { return record.sharded; });
}

FsdpParam::FsdpParam(at::Tensor parameter, std::string name, const ShardLayout& layout, FsdpParamGroup* group,
                     const FullyShardOptions& options)
    : parameter_(std::move(parameter)),
      group_(group),
      layout_(layout),
      tensor_parallel_(tensor_parallel_layouts(parameter_)),
      policy_(options.mixed_precision),
      offload_(options.cpu_offload),
      rank_(layout.shard_group->rank()) {
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  if (!policy_.grad_dtype && sets_grad_dtype(parameter_)) {
    const auto given = parameter_.grad_dtype();
    policy_.grad_dtype = given ? given : policy_.reduce_dtype;
  }
  if (options.param_dtype_override_fn) dtype_override_ = options.param_dtype_override_fn(parameter_);
  if (!tensor_parallel_.empty()) joint_mesh_ = joint_mesh(layout_.mesh, tensor_parallel_);
  const auto placement = options.shard_placement_fn ? options.shard_placement_fn(parameter_) : ShardPlacement{};
  geometry_ = geometry_of(parameter_, name, placement, layout_.shard_group->size());

  info_ = c10::make_intrusive<GuardInfo>();
  info_->name = std::move(name);
  grad_info_ = c10::make_intrusive<GuardInfo>();
  grad_info_->kind = GuardInfo::Kind::kGradient;
  grad_info_->name = info_->name;

  bind_sharded_param(rows_of(parameter_));
  sharding_groups_ = megashard::sharding_groups(sharded_tensor());
  switch_to(guarded_sharded_param_);
  if (policy_.grad_dtype && at::isFloatingType(stored_dtype())) parameter_.set_grad_dtype(policy_.grad_dtype);
  ParameterRecords::all().change(parameter_, [this](ParameterRecord& record) { record.sharded = this; });
}

FsdpParam::~FsdpParam() {
  remove_accumulator();
  ParameterRecords::all().change(parameter_, [](ParameterRecord& record) { record.sharded = nullptr; });
}

void FsdpParam::set_name(const std::string& name) {
  info_->name = name;
  grad_info_->name = name;
  if (unsharded_.tensor().defined()) unsharded_.set_name(name);
}

ShardedTensor FsdpParam::sharded_tensor() const {
  std::vector<Placement> placements;
  if (layout_.mesh->ndim() == 2) placements.push_back(Placement::replicate());
  placements.push_back(Placement::shard(geometry_.dim));
  ShardedTensor part{sharded_param_, geometry_.sizes, geometry_.offsets(rank_), layout_.mesh, std::move(placements)};
  return tensor_parallel_.empty() ? part : in_whole_model(std::move(part), tensor_parallel_, joint_mesh_);
}

c10::Device FsdpParam::sharded_device() const { return offload_ ? c10::Device(c10::kCPU) : layout_.mesh->device(); }

/// View of this rank's part of a whole tensor.
at::Tensor FsdpParam::part_of(const at::Tensor& whole) const {
  return narrowed(whole.detach(), geometry_.offsets(rank_), geometry_.local_sizes(rank_));
}

at::Tensor FsdpParam::rows_of(const at::Tensor& whole) const {
  const at::Tensor rows = part_of(whole);
  return rows.is_meta() || rows.device() == sharded_device() ? rows.clone(at::MemoryFormat::Contiguous)
                                                             : rows.to(sharded_device()).contiguous();
}

bool FsdpParam::pins_host_memory() const {
  return offload_ && offload_->pin_memory && !layout_.mesh->device().is_cpu();
}

void FsdpParam::bind_sharded_param(const at::Tensor& local) {
  sharded_param_ = pins_host_memory() && local.is_cpu() && !local.is_pinned() ? local.pin_memory() : local;
  info_->layout = c10::str("local rows ", sizes_text(sharded_param_.sizes()), " of ", sizes_text(geometry_.sizes));
  grad_info_->layout = info_->layout;
  guarded_sharded_param_ = guarded(sharded_param_, info_);
}

at::Tensor FsdpParam::sharded_param_on_device() const {
  const auto device = layout_.mesh->device();
  return sharded_param_.device() == device ? sharded_param_ : sharded_param_.to(device, /*non_blocking=*/true);
}

void FsdpParam::switch_to(const at::Tensor& tensor) {
  parameter_.unsafeGetTensorImpl()->shallow_copy_from(tensor.getIntrusivePtr());
}

void FsdpParam::init_unsharded(std::optional<at::ScalarType> param_dtype) {
  if (dtype_override_) param_dtype = dtype_override_;
  const bool converts = param_dtype.has_value() && at::isFloatingType(stored_dtype());
  const auto compute_dtype = converts ? *param_dtype : stored_dtype();
  const auto device = layout_.mesh->device();
  const bool aliases = layout_.shard_group->size() == 1 && compute_dtype == stored_dtype() && extension_ == nullptr &&
                       sharded_param_.device() == device;
  const bool fits = stored_dtype_seen_ && compute_dtype == compute_dtype_ && aliases == aliases_sharded_param_;
  stored_dtype_seen_ = stored_dtype();
  if (fits) return;
  compute_dtype_ = compute_dtype;
  aliases_sharded_param_ = aliases;
  unsharded_ = aliases ? UnshardedStorage() : UnshardedStorage(geometry_.sizes, compute_dtype_, device);
  remove_accumulator();
  set_name(info_->name);
}

/// The policy sets the gradient dtype: a dtype set by the user after fully_shard would not reach the reduction.
void FsdpParam::check_grad_dtype() const {
  if (sharded_grad_is_aside_ || !parameter_.requires_grad() || !at::isFloatingType(parameter_.scalar_type())) return;
  const auto expected = policy_.grad_dtype.value_or(parameter_.scalar_type());
  const auto actual = parameter_.grad_dtype();
  TORCH_CHECK(actual == expected, "parameter '", name(), "' was given gradients in ",
              actual ? c10::toString(*actual) : "any dtype", " after fully_shard, which expects ", expected,
              ": set MixedPrecisionPolicy.grad_dtype instead");
}

bool FsdpParam::reset_sharded_param() {
  check_grad_dtype();
  if (parameter_.storage().unsafeGetStorageImpl() == sharded_param_.storage().unsafeGetStorageImpl())
    return stored_dtype_seen_ != stored_dtype();
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  const at::Tensor data = unguarded(parameter_);
  TORCH_CHECK(data.sizes() == sharded_param_.sizes() || data.sizes() == at::IntArrayRef(geometry_.sizes), "parameter '",
              name(), "' was replaced by a tensor of sizes ", data.sizes(),
              " while it is sharded: expected its local rows ", sharded_param_.sizes(), " or the whole ",
              sizes_text(geometry_.sizes),
              ". Load weights through load_checkpoint, or copy_ local rows into the parameter");
  TORCH_CHECK(data.is_meta() || data.device() == sharded_device(), "parameter '", name(), "' was moved to ",
              data.device(), ", but its local rows belong on ", sharded_device(), offload_ ? " (CPU offload)" : "",
              ": leave the device to the mesh");
  const bool whole = data.sizes() != sharded_param_.sizes();
  bind_sharded_param(whole ? rows_of(data) : data.contiguous());
  switch_to(guarded_sharded_param_);
  return stored_dtype_seen_ != stored_dtype();
}

at::ScalarType FsdpParam::reduced_dtype() const {
  return policy_.grad_dtype.value_or(kReducesInStoredDtype ? stored_dtype() : compute_dtype_);
}

void FsdpParam::install_accumulator() {
  using torch::autograd::impl::grad_accumulator;
  if (!parameter_.requires_grad()) return;
  set_grad_accumulator(parameter_, accumulator_);
  if (accumulator_ != nullptr) return;
  accumulator_ = grad_accumulator(parameter_);
  using torch::autograd::variable_list;
  using torch::autograd::utils::LambdaPostHook;
  accumulator_hook_ = accumulator_->add_post_hook(
      std::make_unique<LambdaPostHook>([this](const variable_list& outputs, const variable_list&) {
        group_->reshard_when_complete(*this);
        return outputs;
      }));
}

void FsdpParam::remove_accumulator() {
  if (accumulator_ != nullptr) accumulator_->del_post_hook(accumulator_hook_);
  accumulator_ = nullptr;
}

void FsdpParam::to_unsharded() {
  if (is_unsharded_) return;
  switch_to(aliases_sharded_param_ ? sharded_param_ : unsharded_.tensor());
  install_accumulator();
  version_when_unsharded_ = parameter_._version();
  is_unsharded_ = true;
}

bool FsdpParam::changed_while_unsharded() const {
  return is_unsharded_ && !aliases_sharded_param_ && parameter_._version() != version_when_unsharded_;
}

void FsdpParam::to_sharded() {
  if (!is_unsharded_) return;
  switch_to(guarded_sharded_param_);  // keeps the accumulator: autograd::grad(loss, {parameter}) looks for it
  is_unsharded_ = false;
}

void FsdpParam::free_unsharded() {
  to_sharded();
  if (!aliases_sharded_param_ && !group_->keep_unsharded_storage) unsharded_.release();
}

void FsdpParam::assign_full(const at::Tensor& given) {
  const c10::NoGradGuard no_grad;
  const at::Tensor whole =
      tensor_parallel_.empty() ? given : tensor_parallel_slice(given, geometry_.sizes, tensor_parallel_);
  TORCH_CHECK(whole.sizes() == at::IntArrayRef(geometry_.sizes), "parameter '", name(), "' has sizes ",
              sizes_text(geometry_.sizes), ", but the weights given have ", whole.sizes());
  if (is_meta()) materialise_empty(sharded_device());
  sharded_param_.copy_(part_of(whole));
}

void FsdpParam::materialise_empty(c10::Device device) {
  TORCH_INTERNAL_ASSERT(is_meta() && !is_unsharded_);
  const c10::InferenceMode no_inference(false);
  const bool pin = pins_host_memory();
  bind_sharded_param(
      at::empty(sharded_param_.sizes(),
                sharded_param_.options().device(offload_ ? sharded_device() : device).pinned_memory(pin)));
  switch_to(guarded_sharded_param_);
}

void FsdpParam::set_aside_sharded_grad() {
  if (sharded_grad_is_aside_) return;
  sharded_grad_is_aside_ = true;
  sharded_grad_ = parameter_.grad();
  parameter_.mutable_grad() = at::Tensor();
  if (reduces_wider(policy_, stored_dtype())) parameter_.set_grad_dtype(std::nullopt);
}

at::Tensor FsdpParam::take_unsharded_grad() {
  if (!sharded_grad_is_aside_) return {};
  sharded_grad_is_aside_ = false;
  at::Tensor gradient = std::move(parameter_.mutable_grad());
  if (reduces_wider(policy_, stored_dtype())) parameter_.set_grad_dtype(policy_.grad_dtype);
  parameter_.mutable_grad() = std::move(sharded_grad_);
  sharded_grad_ = at::Tensor();
  return gradient;
}

void FsdpParam::accumulate_sharded_grad(const at::Tensor& buffer, int64_t offset) {
  at::Tensor& mine = sharded_grad_is_aside_ ? sharded_grad_ : parameter_.mutable_grad();
  const at::Tensor given = flat_view(buffer, sharded_param_.sizes(), offset);
  if (adds_on_device() && given.element_size() < mine.element_size()) {
    unguarded(mine).add_(given);
    return;
  }
  const at::Tensor rows = to_stored_grad(given, mine.defined());
  if (!mine.defined()) {
    mine = guarded(rows, grad_info_);
  } else if (rows.is_cpu() && mine.is_contiguous() && mine.scalar_type() == rows.scalar_type()) {
    // Earlier offloaded gradients have arrived: the host has waited for `rows` on the same stream.
    if (!plan_host_pass(static_cast<int64_t>(3 * rows.nbytes())))
      add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());
  } else {
    unguarded(mine).add_(rows);
  }
}

bool FsdpParam::takes_reduced_rows(const at::Tensor& buffer) const {
  return !sharded_grad().defined() && !has_grad_hooks() && buffer.scalar_type() == grad_dtype() &&
         buffer.device() == sharded_param_.device();
}

bool FsdpParam::adds_on_device() const {
  const at::Tensor& mine = sharded_grad();
  return mine.defined() && !mine.is_cpu();
}

/// Converts to the gradient's dtype and the shard's device; returns the rows themselves if both match.
at::Tensor FsdpParam::to_stored_grad(const at::Tensor& rows, bool adds) {
  at::Tensor converted = rows;
  if (rows.scalar_type() != grad_dtype()) {
    converted = at::empty(rows.sizes(), rows.options().dtype(grad_dtype()));
    if (rows.is_cpu()) {
      copy_elements(converted.data_ptr(), grad_dtype(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());
    } else {
      converted.copy_(rows);
    }
  }
  if (rows.device() == sharded_param_.device()) return converted;
  const bool pinned = offload_ && offload_->pin_memory;
  at::Tensor on_host = at::empty(rows.sizes(), converted.options().device(c10::kCPU).pinned_memory(pinned));
  on_host.copy_(converted, /*non_blocking=*/pinned && !adds);
  if (pinned && !adds) offloaded_grad_ = StreamEvent::record(current_stream(rows.device()));
  return on_host;
}

void FsdpParam::wait_for_offloaded_grad() { std::exchange(offloaded_grad_, {}).synchronize(); }

void FsdpParam::run_grad_hooks() {
  wait_for_offloaded_grad();
  for (const auto& hook : grad_hooks_) hook(parameter_);
}

}  // namespace megashard
