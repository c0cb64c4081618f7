#include "parallel/fsdp/fsdp_param.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "parallel/copies/element_copy.h"
#include "parallel/fsdp/flat_view.h"

namespace megashard {
namespace {

/// From a parameter's TensorImpl to its FsdpParam: a table of its own, because set_data drops
/// whatever else a TensorImpl could carry.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, FsdpParam*> params;
};

Registry& registry() {
  static auto* registry = new Registry;  // leaked: models may outlive static destruction
  return *registry;
}

std::string sizes_text(at::IntArrayRef sizes) { return c10::str(sizes); }

/// How the options cut a parameter.
ShardGeometry geometry_of(const at::Tensor& parameter, const std::string& name,
                          const FullyShardOptions& options, int ranks) {
  const auto sizes = parameter.sizes().vec();
  const int64_t leading =
      options.shard_leading_dims ? options.shard_leading_dims(parameter) : int64_t{1};
  TORCH_CHECK(1 <= leading && leading <= parameter.dim(), "shard_leading_dims is ", leading, " for parameter '", name,
              "', which has ", parameter.dim(), " dimension(s): give a number between 1 and that");
  if (leading > 1) {
    TORCH_CHECK(!options.shard_dim || options.shard_dim(parameter) == 0, "parameter '", name, "' is to be sharded along "
                "its first ", leading, " dimensions and along dimension ", options.shard_dim(parameter),
                ": shard_dim must give 0 where shard_leading_dims gives more than 1");
    auto geometry = ShardGeometry::of_leading(sizes, leading, ranks);
    TORCH_CHECK(geometry.has_value(), "parameter '", name, "' of sizes ", parameter.sizes(), " cannot be sharded along "
                "its first ", leading, " dimensions over ", ranks, " ranks: each rank must get whole slices of one of "
                "them, or an equal part of one slice");
    return *std::move(geometry);
  }
  if (!options.shard_dim) return {sizes, 0, ranks};
  const int64_t asked = options.shard_dim(parameter);
  const int64_t dim = asked < 0 ? asked + parameter.dim() : asked;
  TORCH_CHECK(0 <= dim && dim < parameter.dim(), "shard dimension ", asked, " of parameter '", name, "' is invalid: it "
              "has ", parameter.dim(), " dimension(s)");
  TORCH_CHECK(dim == 0 || parameter.size(dim) % ranks == 0, "parameter '", name, "' of sizes ", parameter.sizes(),
              " cannot be sharded on dimension ", dim, " over ", ranks, " ranks: only dimension 0 may be uneven");
  return {sizes, dim, ranks};
}

}  // namespace

FsdpParam* find_fsdp_param(const at::Tensor& parameter) {
  if (!parameter.defined()) return nullptr;
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().params.find(parameter.unsafeGetTensorImpl());
  return found == registry().params.end() ? nullptr : found->second;
}

FsdpParam::FsdpParam(at::Tensor parameter, std::string name, const ShardLayout& layout,
                     FsdpGroup* group, const FullyShardOptions& options)
    : parameter_(std::move(parameter)),
      group_(group),
      layout_(layout),
      tensor_parallel_(tensor_parallel_layout(parameter_)),
      policy_(options.mixed_precision),
      offload_(options.cpu_offload),
      rank_(layout.shard_group->rank()) {
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  if (tensor_parallel_) joint_mesh_ = joint_mesh(layout_.mesh, *tensor_parallel_);
  const int ranks = layout_.shard_group->size();
  geometry_ = geometry_of(parameter_, name, options, ranks);

  info_ = c10::make_intrusive<GuardInfo>();
  info_->name = std::move(name);
  gradient_info_ = c10::make_intrusive<GuardInfo>();
  gradient_info_->kind = GuardInfo::Kind::kGradient;
  gradient_info_->name = info_->name;

  bind_shard(rows_of(parameter_));
  switch_to(guarded_shard_);
  if (policy_.grad_dtype && at::isFloatingType(stored_dtype()))
    parameter_.set_grad_dtype(policy_.grad_dtype);
  const std::lock_guard lock(registry().mutex);
  registry().params.emplace(parameter_.unsafeGetTensorImpl(), this);
}

FsdpParam::~FsdpParam() {
  remove_accumulator();
  const std::lock_guard lock(registry().mutex);
  registry().params.erase(parameter_.unsafeGetTensorImpl());
}

void FsdpParam::set_name(const std::string& name) {
  info_->name = name;
  gradient_info_->name = name;
  if (full_.tensor().defined()) full_.set_name(name);
}

ShardedTensor FsdpParam::view() const {
  std::vector<Placement> placements;
  if (layout_.mesh->ndim() == 2) placements.push_back(Placement::replicate());
  placements.push_back(Placement::shard(geometry_.dim));
  ShardedTensor part{shard_, geometry_.sizes, geometry_.offsets(rank_), layout_.mesh,
                     std::move(placements)};
  return tensor_parallel_ ? in_whole_model(std::move(part), *tensor_parallel_, joint_mesh_) : part;
}

c10::Device FsdpParam::shard_device() const {
  return offload_ ? c10::Device(c10::kCPU) : layout_.mesh->device();
}

/// A view of this rank's part of a whole tensor.
at::Tensor FsdpParam::part_of(const at::Tensor& whole) const {
  at::Tensor part = whole.detach();
  const auto offsets = geometry_.offsets(rank_), sizes = geometry_.local_sizes(rank_);
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != geometry_.sizes[i])
      part = part.narrow(static_cast<int64_t>(i), offsets[i], sizes[i]);
  }
  return part;
}

at::Tensor FsdpParam::rows_of(const at::Tensor& whole) const {
  const at::Tensor rows = part_of(whole);
  return rows.is_meta() || rows.device() == shard_device()
             ? rows.clone(at::MemoryFormat::Contiguous)
             : rows.to(shard_device()).contiguous();
}

void FsdpParam::bind_shard(const at::Tensor& local) {
  const bool pin = offload_ && offload_->pin_memory && !layout_.mesh->device().is_cpu();
  shard_ = pin && local.is_cpu() && !local.is_pinned() ? local.pin_memory() : local;
  info_->layout =
      c10::str("local rows ", sizes_text(shard_.sizes()), " of ", sizes_text(geometry_.sizes));
  gradient_info_->layout = info_->layout;
  guarded_shard_ = guarded(shard_, info_);
}

at::Tensor FsdpParam::shard_on_device() const {
  const auto device = layout_.mesh->device();
  return shard_.device() == device ? shard_ : shard_.to(device, /*non_blocking=*/true);
}

void FsdpParam::switch_to(const at::Tensor& tensor) {
  parameter_.unsafeGetTensorImpl()->shallow_copy_from(tensor.getIntrusivePtr());
}

void FsdpParam::prepare(std::optional<at::ScalarType> param_dtype) {
  const bool converts = param_dtype.has_value() && at::isFloatingType(stored_dtype());
  compute_dtype_ = converts ? *param_dtype : stored_dtype();
  prepared_dtype_ = stored_dtype();
  const auto device = layout_.mesh->device();
  shares_shard_ = layout_.shard_group->size() == 1 && compute_dtype_ == stored_dtype() &&
                  extension_ == nullptr && shard_.device() == device;
  full_ = shares_shard_ ? FullStorage() : FullStorage(geometry_.sizes, compute_dtype_, device);
  remove_accumulator();
  set_name(info_->name);
}

/// Its dtype is the policy's affair: what the user sets afterwards would not reach the reduction.
void FsdpParam::check_grad_dtype() const {
  if (!parameter_.requires_grad() || !at::isFloatingType(parameter_.scalar_type())) return;
  const auto expected = policy_.grad_dtype.value_or(parameter_.scalar_type());
  const auto actual = parameter_.grad_dtype();
  TORCH_CHECK(actual == expected, "parameter '", name(), "' was given gradients in ", actual ? c10::toString(*actual) :
              "any dtype", " after fully_shard, which expects ", expected, ": set MixedPrecisionPolicy.grad_dtype instead");
}

bool FsdpParam::adopt_rebound_data() {
  check_grad_dtype();
  if (parameter_.storage().unsafeGetStorageImpl() == shard_.storage().unsafeGetStorageImpl())
    return prepared_dtype_ != stored_dtype();
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  const at::Tensor data = unguarded(parameter_);
  TORCH_CHECK(data.sizes() == shard_.sizes() || data.sizes() == at::IntArrayRef(geometry_.sizes), "parameter '", name(),
              "' was replaced by a tensor of sizes ", data.sizes(), " while it is sharded: expected its local rows ",
              shard_.sizes(), " or the whole ", sizes_text(geometry_.sizes),
              ". Load weights through load_checkpoint, or copy_ local rows into the parameter");
  TORCH_CHECK(data.is_meta() || data.device() == shard_device(), "parameter '", name(), "' was moved to ", data.device(),
              ", but its local rows belong on ", shard_device(), offload_ ? " (CPU offload)" : "",
              ": leave the device to the mesh");
  const bool whole = data.sizes() != shard_.sizes();
  bind_shard(whole ? rows_of(data) : data.contiguous());
  switch_to(guarded_shard_);
  return prepared_dtype_ != stored_dtype();
}

void FsdpParam::install_accumulator() {
  using torch::autograd::impl::grad_accumulator;
  using torch::autograd::impl::set_grad_accumulator;
  if (!parameter_.requires_grad()) return;
  set_grad_accumulator(parameter_, accumulator_);
  if (accumulator_ != nullptr) return;
  accumulator_ = grad_accumulator(parameter_);
  using torch::autograd::variable_list;
  using torch::autograd::utils::LambdaPostHook;
  accumulator_hook_ = accumulator_->add_post_hook(std::make_unique<LambdaPostHook>(
      [this](const variable_list& outputs, const variable_list&) {
        group_->gradient_complete(*this);
        return outputs;
      }));
}

void FsdpParam::remove_accumulator() {
  if (accumulator_ != nullptr) accumulator_->del_post_hook(accumulator_hook_);
  accumulator_ = nullptr;
}

void FsdpParam::to_full() {
  if (is_full_) return;
  switch_to(shares_shard_ ? shard_ : full_.tensor());
  install_accumulator();
  version_when_gathered_ = parameter_._version();
  is_full_ = true;
}

bool FsdpParam::changed_while_full() const {
  return is_full_ && !shares_shard_ && parameter_._version() != version_when_gathered_;
}

void FsdpParam::to_sharded() {
  if (!is_full_) return;
  switch_to(
      guarded_shard_);  // keeps the accumulator: autograd::grad(loss, {parameter}) looks for it
  is_full_ = false;
}

void FsdpParam::assign_full(const at::Tensor& given) {
  const c10::NoGradGuard no_grad;
  const at::Tensor whole =
      tensor_parallel_ ? tensor_parallel_slice(given, geometry_.sizes, *tensor_parallel_) : given;
  TORCH_CHECK(whole.sizes() == at::IntArrayRef(geometry_.sizes), "parameter '", name(), "' has sizes ",
              sizes_text(geometry_.sizes), ", but the weights given have ", whole.sizes());
  if (is_meta()) materialise_empty(shard_device());
  shard_.copy_(part_of(whole));
}

void FsdpParam::materialise_empty(c10::Device device) {
  TORCH_INTERNAL_ASSERT(is_meta() && !is_full_);
  const c10::InferenceMode no_inference(false);
  bind_shard(
      at::empty(shard_.sizes(), shard_.options().device(offload_ ? shard_device() : device)));
  switch_to(guarded_shard_);
}

void FsdpParam::stash_gradient() {
  if (stashed_) return;
  stashed_ = true;
  stashed_gradient_ = parameter_.grad();
  parameter_.mutable_grad() = at::Tensor();
}

at::Tensor FsdpParam::take_full_gradient() {
  if (!stashed_) return {};
  stashed_ = false;
  at::Tensor gradient = std::move(parameter_.mutable_grad());
  parameter_.mutable_grad() = std::move(stashed_gradient_);
  stashed_gradient_ = at::Tensor();
  return gradient;
}

void FsdpParam::add_sharded_gradient(const at::Tensor& buffer, int64_t offset) {
  at::Tensor& mine = stashed_ ? stashed_gradient_ : parameter_.mutable_grad();
  const at::Tensor rows =
      to_stored_gradient(flat_view(buffer, shard_.sizes(), offset), mine.defined());
  if (!mine.defined()) {
    mine = guarded(rows, gradient_info_);
  } else if (rows.is_cpu() && mine.is_contiguous() && mine.scalar_type() == rows.scalar_type()) {
    // What was offloaded before is there: the host has waited for `rows` on the same stream.
    add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());
  } else {
    unguarded(mine).add_(rows);
  }
}

/// In the gradient's dtype and where the shard lies; the rows themselves if they are both already.
at::Tensor FsdpParam::to_stored_gradient(const at::Tensor& rows, bool adds) {
  at::Tensor converted = rows;
  if (rows.scalar_type() != gradient_dtype()) {
    converted = at::empty(rows.sizes(), rows.options().dtype(gradient_dtype()));
    if (rows.is_cpu()) {
      copy_elements(converted.data_ptr(), gradient_dtype(), rows.const_data_ptr(),
                    rows.scalar_type(), rows.numel());
    } else {
      converted.copy_(rows);
    }
  }
  if (rows.device() == shard_.device()) return converted;
  const bool pinned = offload_ && offload_->pin_memory;
  at::Tensor on_host =
      at::empty(rows.sizes(), converted.options().device(c10::kCPU).pinned_memory(pinned));
  on_host.copy_(converted, /*non_blocking=*/pinned && !adds);
  if (pinned && !adds) {
    const c10::impl::VirtualGuardImpl device(rows.device().type());
    offloaded_gradient_ = StreamEvent::record(device.getStream(rows.device()));
  }
  return on_host;
}

void FsdpParam::wait_for_offloaded_gradient() {
  std::exchange(offloaded_gradient_, {}).synchronize();
}

void FsdpParam::run_gradient_hooks() {
  wait_for_offloaded_gradient();
  for (const auto& hook : gradient_hooks_) hook(parameter_);
}

}  // namespace megashard
