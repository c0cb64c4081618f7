#include "framework/recompute/activation_offload.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "framework/recompute/offloaded_storage.h"
#include "framework/recompute/saved_tensor_hooks.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/recompute_scope.h"
#include "parallel/guarded_tensor.h"

namespace megashard {
namespace detail {

/// One call of one module: its saved tensors and the call before it.
struct OffloadUnit {
  std::weak_ptr<OffloadUnit> previous;
  std::vector<std::weak_ptr<OffloadedStorage>> saved;
  int64_t backward = -1;  // the backward for which it was fetched

  template <class F>
  void for_each(const F& visit) const {
    for (const auto& weak : saved) {
      if (const auto storage = weak.lock()) visit(*storage);
    }
  }
};

}  // namespace detail

namespace {

using detail::OffloadedStorage;
using detail::OffloadUnit;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

bool is_leaf_that_learns(const at::Tensor& tensor) {
  const at::TensorBase& origin = tensor.is_view() ? tensor._base() : tensor;
  return origin.is_leaf() && origin.requires_grad();
}

}  // namespace

/// Shared with graphs, which may outlive the ActivationOffload.
class ActivationOffload::State : public std::enable_shared_from_this<State> {
 public:
  explicit State(const ActivationOffloadOptions& options) : options_(options) {}

  /// Called after the module has run: frees the memory of the previous one.
  void end(const std::shared_ptr<OffloadUnit>& unit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto before = ended_.lock()) before->for_each([](OffloadedStorage& storage) { storage.let_go(); });
    ended_.reset();
    if (!unit->saved.empty()) ended_ = unit;
    std::erase_if(by_storage_,
                  [](const auto& item) { return item.second.storage.expired() || item.second.offloaded.expired(); });
  }

  std::shared_ptr<OffloadedStorage> pack(const std::shared_ptr<OffloadUnit>& unit, const at::Tensor& tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!streams_) streams_.emplace(tensor.device());
    if (streams_->device != tensor.device()) return nullptr;
    const auto& storage = tensor.storage();
    Known& known = by_storage_[storage.unsafeGetStorageImpl()];
    auto offloaded = known.storage.expired() || known.version != tensor._version() ? nullptr : known.offloaded.lock();
    if (offloaded == nullptr) {
      offloaded = std::make_shared<OffloadedStorage>(tensor, *streams_, counts_);
      known = {WeakStorage(storage.getWeakStorageImpl()), tensor._version(), offloaded};
    }
    if (unit->saved.empty()) unit->previous = std::exchange(last_, unit);
    unit->saved.push_back(offloaded);
    offloaded->add_reader();
    return offloaded;
  }

  at::Tensor unpack(OffloadUnit& unit, OffloadedStorage& offloaded, const detail::TensorGeometry& geometry) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t backward = torch::autograd::get_current_graph_task_id();
    if (unit.backward != backward) {
      unit.backward = backward;
      const auto fetch = [](OffloadedStorage& storage) { storage.fetch(); };
      unit.for_each(fetch);
      if (const auto previous = unit.previous.lock()) previous->for_each(fetch);
    }
    return offloaded.take(geometry);
  }

  int64_t min_elements() const { return options_.min_elements; }
  Traffic traffic() const {
    return {.out_bytes = counts_.out_bytes, .back_bytes = counts_.back_bytes, .host_bytes = counts_.host_bytes};
  }

 private:
  struct Known {
    WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};  // keeps its address from being reused
    int64_t version = 0;
    std::weak_ptr<OffloadedStorage> offloaded;
  };

  ActivationOffloadOptions options_;
  std::mutex mutex_;
  std::optional<detail::OffloadStreams> streams_;
  detail::OffloadCounts counts_;
  std::weak_ptr<OffloadUnit> last_;
  std::weak_ptr<OffloadUnit> ended_;  // its memory is still on the device
  std::unordered_map<const c10::StorageImpl*, Known> by_storage_;
};

class ActivationOffload::Runner final : public ForwardRunner {
 public:
  Runner(std::shared_ptr<State> state, HookedModule& module)
      : state_(std::move(state)), inner_(module.forward_runner()) {
    const auto* owner = dynamic_cast<torch::nn::Module*>(&module);
    if (owner == nullptr) return;
    residents_ = owner->parameters();
    for (const auto& buffer : owner->buffers()) residents_.push_back(buffer);
  }

  std::vector<at::Tensor> run(const Body& body, const std::vector<at::Tensor>& inputs) override {
    if (!at::GradMode::is_enabled()) return run_inner(body, inputs);
    if (RecomputeScope::current() != nullptr) {  // backward needs them immediately
      const SavedTensorHooks none(nullptr);
      return run_inner(body, inputs);
    }
    const auto unit = std::make_shared<OffloadUnit>();
    Provider provider(*this, unit);
    const SavedTensorHooks hooks(&provider);
    auto outputs = run_inner(body, inputs);
    state_->end(unit);
    return outputs;
  }

 private:
  class Hook;
  class Provider final : public SavedTensorProvider {
   public:
    Provider(const Runner& owner, std::shared_ptr<OffloadUnit> of) : runner(owner), unit(std::move(of)) {}
    std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;

    const Runner& runner;
    std::shared_ptr<OffloadUnit> unit;
  };

  std::vector<at::Tensor> run_inner(const Body& body, const std::vector<at::Tensor>& inputs) const {
    return inner_ != nullptr ? inner_->run(body, inputs) : body(inputs);
  }

  bool travels(const at::Tensor& tensor) const {
    if (tensor.numel() < state_->min_elements() || tensor.layout() != c10::kStrided || !tensor.has_storage() ||
        !(tensor.is_cpu() || tensor.is_cuda()) || tensor.is_inference() || tensor.is_conj() || tensor.is_neg() ||
        is_guarded(tensor)) {
      return false;
    }
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto over_it = [storage](const at::Tensor& resident) {
      return resident.has_storage() && resident.storage().unsafeGetStorageImpl() == storage;
    };
    return !is_unsharded_storage(storage) && !is_leaf_that_learns(tensor) &&
           std::none_of(residents_.begin(), residents_.end(), over_it);
  }

  std::shared_ptr<State> state_;
  std::shared_ptr<ForwardRunner> inner_;
  std::vector<at::Tensor> residents_;  // parameters and buffers, which are not offloaded
};

class ActivationOffload::Runner::Hook final : public SavedTensorHook {
 public:
  explicit Hook(const Provider& provider) : provider_(&provider) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const Provider& provider = *std::exchange(provider_, nullptr);  // valid during its forward only
    if (provider.runner.travels(tensor)) {
      state_ = provider.runner.state_;
      unit_ = provider.unit;
      offloaded_ = state_->pack(unit_, tensor);
    }
    if (offloaded_ != nullptr) {
      geometry_.emplace(tensor);
    } else {
      kept_ = tensor.detach();
      version_ = tensor.is_inference() ? 0 : tensor._version();
    }
  }

  at::Tensor call_unpack_hook() override {
    if (offloaded_ != nullptr) return state_->unpack(*unit_, *offloaded_, *geometry_);
    if (!kept_.is_inference()) detail::check_unchanged(kept_.sizes(), version_, kept_._version());
    return kept_;
  }

 private:
  const Provider* provider_;
  std::shared_ptr<State> state_;  // before offloaded_, which uses its streams until destroyed
  std::shared_ptr<OffloadUnit> unit_;
  std::shared_ptr<OffloadedStorage> offloaded_;
  std::optional<detail::TensorGeometry> geometry_;
  at::Tensor kept_;
  int64_t version_ = 0;
};

std::unique_ptr<torch::autograd::SavedVariableHooks> ActivationOffload::Runner::Provider::make_hooks() {
  return std::make_unique<Hook>(*this);
}

ActivationOffload::ActivationOffload(const ActivationOffloadOptions& options)
    : state_(std::make_shared<State>(options)) {}

ActivationOffload::~ActivationOffload() = default;

void ActivationOffload::add(HookedModule& module) {
  TORCH_CHECK(dynamic_cast<Runner*>(module.forward_runner().get()) == nullptr, module.class_name(),
              " offloads its activations already: a path pattern matches it twice");
  module.set_forward_runner(std::make_shared<Runner>(state_, module));
}

ActivationOffload::Traffic ActivationOffload::traffic() const { return state_->traffic(); }

}  // namespace megashard
