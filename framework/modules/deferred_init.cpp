#include "framework/modules/deferred_init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "framework/modules/deferred_replay.h"
#include "framework/recompute/call_state.h"
#include "parallel/device/torch_versions.h"

namespace megashard {
namespace detail {
namespace {

constexpr auto kKey = c10::DispatchKey::DeferredInit;

// The tape for the dispatcher's fallback, set by a guard for its thread.
thread_local Tape* recording_tape = nullptr;

void record_on_tape(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kKey);
  TORCH_CHECK(recording_tape != nullptr, c10::toString(op.operator_name()),
              " ran deferred on a thread that has no DeferredInit: construct modules on one thread");
  recording_tape->call(op, *stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&record_on_tape>());
}

}  // namespace

/// A module's tensor when captured. The handle keeps the TensorImpl alive, which identifies it.
struct Captured {
  at::Tensor tensor;
  std::string name;
  bool is_parameter = false;
  TapeTensor recorded;
};

/// A tape and the module tensors recorded on it.
struct InitRecording {
  Tape tape;
  std::vector<Captured> captured;
  std::unordered_map<const c10::TensorImpl*, size_t> by_identity;
  bool replayed = false;
};

namespace {

void capture_one(InitRecording& recording, const std::string& name, const at::Tensor& tensor, bool is_parameter) {
  if (!tensor.defined() || !tensor.is_meta() || recording.by_identity.count(tensor.unsafeGetTensorImpl()) != 0) return;
  recording.by_identity.emplace(tensor.unsafeGetTensorImpl(), recording.captured.size());
  recording.captured.push_back({tensor, name, is_parameter, TapeTensor::of(tensor, name.c_str())});
}

std::string label(const Captured& entry) {
  return c10::str(entry.is_parameter ? "parameter '" : "buffer '", entry.name, "' ",
                  c10::IntArrayRef(entry.recorded.sizes));
}

/// Indices of captured tensors to materialise, in the module's order. Throws if some have no values.
std::vector<size_t> choose(const InitRecording& recording, const torch::nn::Module& module,
                           const InitTape::Options& options) {
  std::vector<size_t> chosen;
  std::string unknown, unset;
  const auto consider = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta()) return;
    const size_t index = recording.by_identity.at(tensor.unsafeGetTensorImpl());
    const auto& entry = recording.captured[index];
    if (std::find(chosen.begin(), chosen.end(), index) != chosen.end()) return;  // tied weights
    if (!recording.tape.made(entry.recorded.key())) {
      unknown += (unknown.empty() ? "" : ", ") + label(entry);
    } else if (!options.allow_unset && !recording.tape.is_set(entry.recorded.key())) {
      unset += (unset.empty() ? "" : ", ") + label(entry);
    } else {
      chosen.push_back(index);
    }
  };
  if (options.parameters) {
    for (const auto& item : module.named_parameters()) consider(item.value());
  }
  for (const auto& item : module.named_buffers()) consider(item.value());
  TORCH_CHECK(unknown.empty(),
              "these tensors are on meta, but not made under this tape's DeferredInit, so nothing can set them: ",
              unknown, "; construct them under the guard, or on the CPU");
  TORCH_CHECK(unset.empty(), "the construction left these tensors unset: ", unset,
              "; initialise them in the constructor (torch::empty only allocates), or set allow_unset when a "
              "checkpoint brings their values");
  return chosen;
}

}  // namespace
}  // namespace detail

InitTape::InitTape() : InitTape(at::detail::getDefaultCPUGenerator()) {}

InitTape::InitTape(at::Generator generator)
    : recording_(new detail::InitRecording{detail::Tape(std::move(generator)), {}, {}, false}) {}

InitTape::~InitTape() = default;

size_t InitTape::operations() const { return recording_->tape.records().size(); }

void InitTape::capture(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) detail::capture_one(*recording_, item.key(), item.value(), true);
  for (const auto& item : module.named_buffers()) detail::capture_one(*recording_, item.key(), item.value(), false);
}

void InitTape::explain(const c10::Error& error) const {
  const std::string message = error.what_without_backtrace();
  TORCH_CHECK(message.find("data is not allocated yet") == std::string::npos,
              "a constructor reads or writes a tensor's bytes (data_ptr, accessor) while it is constructed deferred, "
              "on meta, probably the one made last: ",
              recording_->tape.last_allocation(),
              "; use tensor operations or torch::tensor({...}), or construct without DeferredInit");
}

InitTape::Report InitTape::materialise(torch::nn::Module& module, const Assign& assign, const Options& options) {
  auto& recording = *recording_;
  auto& tape = recording.tape;
  TORCH_CHECK(!recording.replayed, "this tape was replayed already: its tensors are real; record a new construction");
  TORCH_CHECK(tape.disturbance().empty(), tape.disturbance());
  const c10::impl::ExcludeDispatchKeyGuard not_recording(detail::kKey);
  capture(module);
  const auto chosen = detail::choose(recording, module, options);
  recording.replayed = true;

  std::unordered_map<detail::StorageKey, std::vector<size_t>> by_storage;
  std::unordered_set<detail::StorageKey> wanted;
  for (const auto index : chosen) {
    const auto key = recording.captured[index].recorded.key();
    by_storage[key].push_back(index);
    wanted.insert(key);
  }
  std::vector<bool> draws;
  for (const auto& track : tape.tracks()) draws.push_back(options.parameters && !track.pending.defined());

  Report report;
  detail::Replay replay(tape);
  const auto hand_out = [&](detail::StorageKey key) {
    for (const auto index : by_storage.at(key)) {
      auto& entry = recording.captured[index];
      const auto full = replay.tensor(entry.recorded);
      assign(entry.name, entry.tensor, full);
      ++report.tensors;
      report.full_bytes += static_cast<int64_t>(full.nbytes());
    }
  };
  for (const auto& step : tape.plan(wanted, draws)) {
    replay.run(tape.records()[step.record]);
    for (const auto key : step.finished) hand_out(key);
    for (const auto key : step.last_uses) replay.drop(key);
  }
  TORCH_INTERNAL_ASSERT(report.tensors == static_cast<int64_t>(chosen.size()), "a tensor was not replayed");
  report.operations = replay.operations();
  report.peak_bytes = replay.peak_bytes();
  tape.leave_generators(replay, options.parameters);
  return report;
}

DeferredInit::DeferredInit(InitTape& tape)
    : outer_(detail::recording_tape), outer_included_(c10::impl::tls_is_dispatch_key_included(detail::kKey)) {
  TORCH_CHECK(!tape.recording_->replayed, "this tape was replayed already: record on a new one");
  tape.recording_->tape.begin_recording();
  detail::recording_tape = &tape.recording_->tape;
  c10::impl::tls_set_dispatch_key_included(detail::kKey, true);
}

DeferredInit::~DeferredInit() {
  c10::impl::tls_set_dispatch_key_included(detail::kKey, outer_included_);
  detail::recording_tape->end_recording();
  detail::recording_tape = outer_;
}

void become(at::Tensor& target, const at::Tensor& value) {
  const c10::InferenceMode not_inference(false);
  target.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
  // A gradient accumulator created for the meta tensor would reject the new gradients.
  if (target.requires_grad() && target.is_leaf()) set_grad_accumulator(target, nullptr);
}

}  // namespace megashard
