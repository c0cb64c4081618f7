#include "parallel/fsdp_param.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>

#include "parallel/element_copy.h"

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

/// Contiguous view of a 1-D buffer without the cost of dispatched view operators.
at::Tensor strided_over(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer.storage()),
                                                       buffer.key_set(), buffer.dtype());
  view.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  view.unsafeGetTensorImpl()->set_storage_offset(buffer.storage_offset() + offset);
  return view;
}

at::Tensor copy_of_rows(const at::Tensor& whole, ChunkRange rows) {
  return whole.detach().narrow(0, std::min(rows.offset, whole.size(0)), rows.size).clone();
}

}  // namespace

FsdpParam* find_fsdp_param(const at::Tensor& parameter) {
  if (!parameter.defined()) return nullptr;
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().params.find(parameter.unsafeGetTensorImpl());
  return found == registry().params.end() ? nullptr : found->second;
}

FsdpParam::FsdpParam(at::Tensor parameter, std::string name, const ShardLayout& layout,
                     FsdpGroup* group)
    : parameter_(std::move(parameter)), group_(group), layout_(layout) {
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  global_sizes_ = parameter_.sizes().vec();
  global_numel_ = parameter_.numel();
  const int64_t length = global_sizes_[0];
  const int ranks = layout_.shard_group->size();
  row_numel_ = length == 0 ? 0 : global_numel_ / length;
  chunk_numel_ = chunk_range(length, ranks, 0).size * row_numel_;
  rows_ = chunk_range(length, ranks, layout_.shard_group->rank());

  info_ = c10::make_intrusive<GuardInfo>();
  info_->name = std::move(name);
  gradient_info_ = c10::make_intrusive<GuardInfo>();
  gradient_info_->kind = GuardInfo::Kind::kGradient;
  gradient_info_->name = info_->name;

  const at::Tensor rows = copy_of_rows(parameter_, rows_);
  bind_shard(rows.is_meta() ? rows : rows.to(layout_.mesh->device()));
  switch_to(guarded_shard_);
  const std::lock_guard lock(registry().mutex);
  registry().params.emplace(parameter_.unsafeGetTensorImpl(), this);
}

FsdpParam::~FsdpParam() {
  const std::lock_guard lock(registry().mutex);
  registry().params.erase(parameter_.unsafeGetTensorImpl());
}

void FsdpParam::set_name(const std::string& name) {
  info_->name = name;
  gradient_info_->name = name;
  if (full_.tensor().defined()) full_.set_name(name);
}

ShardedTensor FsdpParam::view() const {
  std::vector<int64_t> offsets(global_sizes_.size(), 0);
  offsets[0] = rows_.offset;
  std::vector<Placement> placements;
  if (layout_.mesh->ndim() == 2) placements.push_back(Placement::replicate());
  placements.push_back(Placement::shard(0));
  return {shard_, global_sizes_, std::move(offsets), layout_.mesh, std::move(placements)};
}

void FsdpParam::bind_shard(at::Tensor local) {
  shard_ = std::move(local);
  info_->layout =
      c10::str("local rows ", sizes_text(shard_.sizes()), " of ", sizes_text(global_sizes_));
  gradient_info_->layout = info_->layout;
  guarded_shard_ = guarded(shard_, info_);
}

void FsdpParam::switch_to(const at::Tensor& tensor) {
  parameter_.unsafeGetTensorImpl()->shallow_copy_from(tensor.getIntrusivePtr());
}

void FsdpParam::prepare(std::optional<at::ScalarType> param_dtype) {
  const bool converts = param_dtype.has_value() && at::isFloatingType(stored_dtype());
  compute_dtype_ = converts ? *param_dtype : stored_dtype();
  shares_shard_ = layout_.shard_group->size() == 1 && compute_dtype_ == stored_dtype();
  if (!shares_shard_) full_ = FullStorage(global_sizes_, compute_dtype_, shard_.device());
  set_name(info_->name);
}

void FsdpParam::adopt_rebound_data() {
  if (parameter_.storage().unsafeGetStorageImpl() == shard_.storage().unsafeGetStorageImpl())
    return;
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  const at::Tensor data = unguarded(parameter_);
  TORCH_CHECK(data.sizes() == shard_.sizes() || data.sizes() == at::IntArrayRef(global_sizes_), "parameter '", name(),
              "' was replaced by a tensor of sizes ", data.sizes(), " while it is sharded: expected its local rows ",
              shard_.sizes(), " or the whole ", sizes_text(global_sizes_),
              ". Load weights through load_checkpoint, or copy_ local rows into the parameter");
  TORCH_CHECK(data.scalar_type() == stored_dtype() && data.device() == shard_.device(), "parameter '", name(),
              "' changed from ", stored_dtype(), " on ", shard_.device(), " to ", data.scalar_type(), " on ",
              data.device(), " after fully_shard (Module::to?): convert the module before fully_shard, or set "
              "MixedPrecisionPolicy.param_dtype for compute in another dtype");
  const bool whole = data.sizes() != shard_.sizes();
  bind_shard(whole ? copy_of_rows(data, rows_) : data.contiguous());
  switch_to(guarded_shard_);
}

void FsdpParam::install_accumulator() {
  using torch::autograd::impl::grad_accumulator;
  using torch::autograd::impl::set_grad_accumulator;
  if (!parameter_.requires_grad()) return;
  set_grad_accumulator(parameter_, accumulator_);
  if (accumulator_ == nullptr) accumulator_ = grad_accumulator(parameter_);
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

void FsdpParam::assign_full(const at::Tensor& whole) {
  const c10::NoGradGuard no_grad;
  TORCH_CHECK(whole.sizes() == at::IntArrayRef(global_sizes_), "parameter '", name(), "' has sizes ",
              sizes_text(global_sizes_), ", but the weights given have ", whole.sizes());
  if (is_meta()) materialise_empty(layout_.mesh->device());
  shard_.copy_(whole.detach().narrow(0, std::min(rows_.offset, whole.size(0)), rows_.size));
}

void FsdpParam::materialise_empty(c10::Device device) {
  TORCH_INTERNAL_ASSERT(is_meta() && !is_full_);
  const c10::InferenceMode no_inference(false);
  bind_shard(at::empty(shard_.sizes(), shard_.options().device(device)));
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
  at::Tensor rows = strided_over(buffer, shard_.sizes(), offset);
  if (rows.scalar_type() != stored_dtype()) {
    at::Tensor converted = at::empty(shard_.sizes(), shard_.options());
    if (rows.is_cpu()) {
      copy_elements(converted.data_ptr(), stored_dtype(), rows.const_data_ptr(), rows.scalar_type(),
                    rows.numel());
    } else {
      converted.copy_(rows);
    }
    rows = std::move(converted);
  }
  if (!mine.defined()) {
    mine = guarded(rows, gradient_info_);
  } else if (rows.is_cpu() && mine.is_contiguous() && mine.scalar_type() == stored_dtype()) {
    add_elements(mine.data_ptr(), rows.const_data_ptr(), stored_dtype(), rows.numel());
  } else {
    unguarded(mine).add_(rows);
  }
}

}  // namespace megashard
