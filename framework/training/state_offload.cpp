#include "framework/training/state_offload.h"

#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "parallel/device/storage.h"
#include "parallel/device/streams.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

const char* name_of(StateKinds kind) { return kind == StateKinds::kModelParams ? "model_params" : "optimizer_states"; }

/// The device where storages are allocated, while it lives; nothing on a CPU.
c10::OptionalDeviceGuard on_device(c10::Device device) {
  return device.is_cpu() ? c10::OptionalDeviceGuard() : c10::OptionalDeviceGuard(device);
}

/// The host waits for what the current stream was given.
void wait_for_current_stream(c10::Device device) { StreamEvent::record(current_stream(device)).synchronize(); }

void free_gathered_parameters(torch::nn::Module& model) {
  for (const auto& module : model.modules()) {
    if (is_fsdp_module(*module)) reshard(*module);
  }
}

}  // namespace

StateOffload::StateOffload(torch::nn::Module& model, Optimizer* optimizer, Options options)
    : model_(model), optimizer_(optimizer), options_(options) {}

/// What lies on the device, once: states may be views of one storage, and those in host memory by
/// an offload policy stay there.
void StateOffload::add_storage(const at::Tensor& tensor, std::vector<c10::Storage>& storages) const {
  if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta()) return;
  const c10::Storage& storage = tensor.storage();
  const auto* impl = storage.unsafeGetStorageImpl();
  if (storage.nbytes() == 0 || storage.device_type() != options_.device.type()) return;
  if (is_unsharded_storage(impl)) return;  // a parameter that backward still holds gathered
  storages.push_back(storage);
}

std::vector<c10::Storage> StateOffload::storages_of(StateKinds kind) const {
  std::vector<c10::Storage> storages;
  if (kind == StateKinds::kModelParams) {
    for (const auto& parameter : model_.parameters()) {
      add_storage(parameter, storages);
      add_storage(parameter.grad(), storages);
    }
    for (const auto& buffer : model_.buffers()) add_storage(buffer, storages);
  } else if (optimizer_ != nullptr) {
    for (const auto& [name, piece] : optimizer_->sharded_state_dict()) add_storage(piece.local, storages);
  }
  const auto address = [](const c10::Storage& storage) { return storage.unsafeGetStorageImpl(); };
  std::ranges::sort(storages, {}, address);
  const auto same = std::ranges::unique(storages, {}, address);
  storages.erase(same.begin(), same.end());
  return storages;
}

bool StateOffload::moves(StateKinds kind, StateKinds include, bool loads) const {
  const bool named = contains(include, kind);
  if (kind == StateKinds::kModelParams) return named && !options_.offload_policy;
  if (options_.offload_policy) return named;
  return loads || (named && !options_.optimizer_states_stay);
}

void StateOffload::load_states(StateKinds include) {
  for (auto& kind : kinds_) {
    if (!kind.loaded && moves(kind.kind, include, /*loads=*/true)) move_in(kind);
  }
}

void StateOffload::offload_states(StateKinds include) {
  for (auto& kind : kinds_) {
    if (kind.loaded && moves(kind.kind, include, /*loads=*/false)) move_out(kind);
  }
}

void StateOffload::move_out(Kind& kind) {
  const auto guard = on_device(options_.device);
  const bool copies = !options_.device.is_cpu();
  if (kind.kind == StateKinds::kModelParams) free_gathered_parameters(model_);
  std::vector<Away> away;
  for (auto& storage : storages_of(kind.kind)) {
    auto& each = away.emplace_back(Away{std::move(storage), {}, {}});
    if (!copies) continue;
    each.host = at::empty({static_cast<int64_t>(each.storage.nbytes())},
                          at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    each.host.copy_(bytes_of(each.storage), /*non_blocking=*/true);
  }
  if (copies) wait_for_current_stream(options_.device);
  for (auto& each : away) {
    auto& storage = *each.storage.unsafeGetStorageImpl();
    set_missing_message(storage, std::string(name_of(kind.kind)) +
                                     " are offloaded to host memory: call StateOffload::load_states "
                                     "before a forward, a backward, a step or a checkpoint");
    auto memory = take_memory(storage);
    if (!copies) each.memory = std::move(memory);
  }
  kind.away = std::move(away);
  kind.loaded = false;
  if (copies) c10::getDeviceAllocator(options_.device.type())->emptyCache();
}

/// One by one: where the device's memory ends, the rest stays away and may be loaded later.
void StateOffload::move_in(Kind& kind) {
  const auto guard = on_device(options_.device);
  while (!kind.away.empty()) {
    auto& each = kind.away.back();
    auto& storage = *each.storage.unsafeGetStorageImpl();
    if (each.storage.use_count() > 1) {  // else nobody holds it any more: a dropped gradient
      if (each.host.defined()) {
        give_memory(storage, c10::GetAllocator(storage.device_type())->allocate(storage.nbytes()));
        bytes_of(each.storage).copy_(each.host, /*non_blocking=*/true);
      } else {
        give_memory(storage, std::move(each.memory));
      }
    }
    kind.away.pop_back();
  }
  // A backward of an earlier forward would gather at once, on other streams.
  if (!options_.device.is_cpu()) wait_for_current_stream(options_.device);
  kind.loaded = true;
}

bool StateOffload::is_loaded(StateKinds kinds) const {
  return std::ranges::all_of(kinds_, [&](const Kind& each) { return each.loaded || !contains(kinds, each.kind); });
}

int64_t StateOffload::host_bytes() const {
  int64_t bytes = 0;
  for (const auto& kind : kinds_) {
    for (const auto& each : kind.away) bytes += static_cast<int64_t>(each.storage.nbytes());
  }
  return bytes;
}

LoadedStates::~LoadedStates() {
  try {
    states_.offload_states(include_);
  } catch (const std::exception&) {  // no host memory: nothing has moved
  }
}

}  // namespace megashard
