#include "framework/modules/deferred_tape.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "framework/modules/deferred_replay.h"
#include "framework/modules/deferred_value.h"
#include "framework/recompute/call_state.h"

namespace megashard::detail {

GeneratorTrack::GeneratorTrack(at::Generator generator)
    : original(std::move(generator)), initial(generator_state(original)), known(initial) {}

void GeneratorTrack::observe() {
  auto now = generator_state(original);
  if (same_generator_state(now, known)) return;
  if (drawn) {
    const auto fresh = at::make_generator<at::CPUGeneratorImpl>(original.current_seed());
    TORCH_CHECK(same_generator_state(now, generator_state(fresh)),
                "random numbers were drawn beside the recorded operations while a module was constructed deferred (by "
                "a thread of its own, or by a C++ engine): an ordinary construction would have other weights; draw "
                "them by tensor operations on the constructing thread");
  }
  known = pending = std::move(now);
  drawn = false;
}

void GeneratorTrack::mark_drawn() {
  {
    const std::lock_guard<std::mutex> lock(original.mutex());
    original.get<at::CPUGeneratorImpl>()->random();
  }
  known = generator_state(original);
  drawn = true;
}

namespace {

bool contains(const std::vector<StorageKey>& keys, StorageKey key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

}  // namespace

/// Analysis of an operator call.
struct Tape::Call {
  Call(const c10::OperatorHandle& handle, const torch::jit::Stack& stack)
      : op(handle), name(c10::toString(handle.operator_name())) {
    const auto& parameters = op.schema().arguments();
    arguments.assign(stack.end() - static_cast<ptrdiff_t>(parameters.size()), stack.end());
    draws = op.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = parameters[i];
      if (parameter.name() == "device") device = static_cast<int>(i);
      if (parameter.name() == "dtype") dtype = static_cast<int>(i);
      if (parameter.name() == "pin_memory") pin_memory = static_cast<int>(i);
      if (parameter.name() == "generator") generator = static_cast<int>(i);
      const bool written = parameter.alias_info() != nullptr && parameter.alias_info()->isWrite();
      if (written && first_written < 0) first_written = static_cast<int>(i);
      visit_ivalue_tensors(arguments[i], [&](const at::Tensor& tensor) {
        has_meta |= tensor.is_meta();
        has_real |= !tensor.is_meta();
        writes_real |= written && !tensor.is_meta();
      });
    }
    draws |= generator >= 0;
    // options() of a deferred tensor say meta, where ordinary construction says CPU.
    if (device >= 0 && arguments[device].isDevice() && arguments[device].toDevice().is_meta()) {
      arguments[device] = c10::Device(c10::kCPU);
    }
  }

  bool is_written(size_t argument) const {
    const auto* alias = op.schema().arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  const c10::OperatorHandle& op;
  std::string name;
  torch::jit::Stack arguments;
  int device = -1, dtype = -1, pin_memory = -1, generator = -1, first_written = -1;
  bool draws = false, has_meta = false, has_real = false, writes_real = false;
};

Tape::Tape(at::Generator default_generator) { tracks_.emplace_back(std::move(default_generator)); }

std::string Tape::last_allocation() const {
  for (auto entry = records_.rbegin(); entry != records_.rend(); ++entry) {
    const auto* result = entry->creates.empty() ? nullptr : std::get_if<TapeTensor>(&entry->results[0]);
    if (result != nullptr) return c10::str(entry->op.schema().name(), " ", c10::IntArrayRef(result->sizes));
  }
  return "none";
}

void Tape::begin_recording() { tracks_[0].observe(); }

void Tape::end_recording() noexcept {
  try {
    for (auto& track : tracks_) track.observe();
  } catch (const std::exception& error) {
    disturbance_ = error.what();
  }
}

void Tape::leave_generators(Replay& replay, bool all_drawn) {
  for (size_t t = 0; t < tracks_.size(); ++t) {
    auto& track = tracks_[t];
    if (!same_generator_state(generator_state(track.original), track.known)) continue;
    at::Tensor end = track.pending;
    if (!end.defined()) end = generator_state(replay.generator(static_cast<int>(t)));
    set_generator_state(track.original, all_drawn ? end : track.initial);
  }
}

int Tape::track_of(const c10::IValue& generator) {
  if (!generator.isGenerator() || !generator.toGenerator().defined()) return 0;
  const auto original = generator.toGenerator();
  TORCH_CHECK(original.device().is_cpu(), "a deferred construction draws from a generator on ", original.device(),
              ": construct with CPU generators, fully_shard moves the results");
  for (size_t i = 0; i < tracks_.size(); ++i) {
    if (tracks_[i].original == original) return static_cast<int>(i);
  }
  tracks_.emplace_back(original);
  return static_cast<int>(tracks_.size()) - 1;
}

void Tape::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Call call(op, stack);
  const bool factory = !call.has_meta && !call.has_real && call.device >= 0;
  if (is_literal(op) || (!call.draws && !call.has_meta && !factory)) {
    std::copy(call.arguments.begin(), call.arguments.end(),
              stack.end() - static_cast<ptrdiff_t>(call.arguments.size()));
    op.callBoxed(stack);
    return;
  }
  if (call.device >= 0 && call.arguments[call.device].isDevice()) {
    const auto device = call.arguments[call.device].toDevice();
    TORCH_CHECK(device.is_cpu(), call.name, " is to make a tensor on ", device,
                " in a deferred construction: construct on the CPU, fully_shard moves the results");
  }
  const bool needs_values = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  if (needs_values || call.writes_real || (call.has_real && !call.has_meta)) {
    run_now(call, stack);
  } else {
    run_on_meta(call, stack);
  }
}

void Tape::run_on_meta(Call& call, torch::jit::Stack& stack) {
  torch::jit::Stack on_meta;
  for (const auto& argument : call.arguments) on_meta.push_back(meta_twin(argument));
  if (call.device >= 0) on_meta[call.device] = c10::Device(c10::kMeta);
  if (call.pin_memory >= 0) on_meta[call.pin_memory] = c10::IValue();
  const auto& schema = call.op.schema();
  const bool in_place = call.first_written >= 0;
  try {
    call.op.callBoxed(on_meta);
  } catch (const c10::NotImplementedError&) {
    if (!in_place) return run_now(call, stack);
    if (schema.returns().size() > 1) throw;
    on_meta.clear();  // an in-place operation needs no meta kernel: it returns its argument
    if (schema.returns().size() == 1) on_meta.push_back(call.arguments[call.first_written]);
  } catch (const c10::Error&) {
    if (in_place) throw;
    return run_now(call,
                   stack);  // the value may matter, or the call is wrong: the CPU kernel knows
  }
  if (call.dtype >= 0 && !call.has_meta && call.arguments[call.dtype].isNone() && on_meta.back().isTensor()) {
    call.arguments[call.dtype] = on_meta.back().toTensor().scalar_type();  // the default dtype may change
  }
  record(call, on_meta);
  stack.resize(stack.size() - schema.arguments().size());
  stack.insert(stack.end(), on_meta.begin(), on_meta.end());
}

void Tape::check_known(const TapeValue& value, const std::string& op_name) const {
  for_each_meta(value, [&](const TapeTensor& tensor) {
    TORCH_CHECK(made(tensor.key()), op_name, " uses a meta tensor of sizes ", c10::IntArrayRef(tensor.sizes),
                " that was made before this DeferredInit: its values are unknown; make it under the guard");
  });
}

void Tape::record(const Call& call, const torch::jit::Stack& results) {
  if (changes_autograd_only(call.op)) return;
  Record entry{.op = call.op,
               .arguments = {},
               .results = {},
               .reads = {},
               .writes = {},
               .creates = {},
               .overwrites = {},
               .state_before = {}};
  bool inputs_set = false;
  bool has_inputs = false;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    entry.arguments.push_back(describe(call.arguments[i], call.name));
    check_known(entry.arguments[i], call.name);
    for_each_meta(entry.arguments[i], [&](const TapeTensor& tensor) {
      has_inputs = true;
      inputs_set |= is_set(tensor.key());
      const bool filled = call.is_written(i) && fills_self(call.op) && tensor.covers_storage();
      if (call.is_written(i)) entry.writes.push_back(tensor.key());
      (filled ? entry.overwrites : entry.reads).push_back(tensor.key());
    });
  }
  std::erase_if(entry.overwrites, [&](StorageKey key) { return contains(entry.reads, key); });
  for (const auto& result : results) {
    entry.results.push_back(describe(result, call.name));
    for_each_meta(entry.results.back(), [&](const TapeTensor& tensor) {
      if (!made(tensor.key()) && !contains(entry.creates, tensor.key())) entry.creates.push_back(tensor.key());
    });
  }
  if (entry.writes.empty() && entry.creates.empty()) return;  // a view

  for (const auto key : entry.writes) storages_[key] = true;
  for (const auto key : entry.creates) {
    storages_[key] = !only_allocates(call.op) && (!has_inputs || inputs_set);
    entry.writes.push_back(key);
  }
  if (call.draws) {
    entry.generator_argument = call.generator;
    entry.track = track_of(call.generator >= 0 ? call.arguments[call.generator] : c10::IValue());
    auto& track = tracks_[entry.track];
    track.observe();
    entry.state_before = std::exchange(track.pending, at::Tensor());
    track.mark_drawn();
  }
  records_.push_back(std::move(entry));
}

/// Computes a call whose values are needed now (item(), nonzero, randperm, deferred tensors written to a real one) on
/// real tensors, replaying as much of the tape as necessary. Its results are real and not recorded.
void Tape::run_now(const Call& call, torch::jit::Stack& stack) {
  std::unordered_set<StorageKey> wanted;
  std::vector<TapeValue> recorded;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    // Real tensors are passed unchanged; meta ones are looked up.
    recorded.push_back(call.is_written(i) && !call.has_meta ? TapeValue(call.arguments[i])
                                                            : describe(call.arguments[i], call.name));
    check_known(recorded[i], call.name);
    for_each_meta(recorded[i], [&](const TapeTensor& tensor) {
      TORCH_CHECK(!call.is_written(i), call.name, " needs the values of deferred tensors and changes one of sizes ",
                  c10::IntArrayRef(tensor.sizes), " in place: use the form that returns a new tensor");
      wanted.insert(tensor.key());
    });
  }
  const int track = call.draws ? track_of(call.generator >= 0 ? call.arguments[call.generator] : c10::IValue()) : -1;
  std::vector<bool> draws(tracks_.size(), false);
  if (track >= 0) {
    tracks_[track].observe();
    draws[track] = !tracks_[track].pending.defined();
  }
  // Draws all recorded numbers of the generators involved and stores their state, so that no later call draws them
  // again.
  auto steps = plan(wanted, draws);
  for (const auto& step : steps) {
    const int drawn = records_[step.record].track;
    if (drawn >= 0 && !tracks_[drawn].pending.defined()) draws[drawn] = true;
  }
  steps = plan(wanted, draws);

  Replay replay(*this);
  for (const auto& step : steps) {
    replay.run(records_[step.record]);
    for (const auto key : step.last_uses) {
      if (wanted.count(key) == 0) replay.drop(key);
    }
  }
  for (size_t t = 0; t < draws.size(); ++t) {
    if (draws[t]) tracks_[t].pending = generator_state(replay.generator(static_cast<int>(t)));
  }

  stack.resize(stack.size() - call.arguments.size());
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const bool own = call.arguments[i].isTensor() && call.arguments[i].toTensor().defined() &&
                     !call.arguments[i].toTensor().is_meta();
    stack.push_back(own ? call.arguments[i] : replay.value(recorded[i]));
  }
  if (track < 0) {
    call.op.callBoxed(stack);
    return;
  }
  set_generator_state(replay.generator(track), tracks_[track].pending);
  replay.call_drawing(call.op, track, call.generator, stack);
  tracks_[track].pending = generator_state(replay.generator(track));
  tracks_[track].mark_drawn();
}

std::vector<Step> Tape::plan(const std::unordered_set<StorageKey>& wanted, std::vector<bool> draws) const {
  auto live = wanted;  // storages whose contents are needed after the current record, iterating backwards
  std::unordered_set<StorageKey> still_wanted = wanted;
  std::vector<Step> steps;
  for (size_t i = records_.size(); i-- > 0;) {
    const auto& entry = records_[i];
    const bool writes_live =
        std::any_of(entry.writes.begin(), entry.writes.end(), [&](StorageKey key) { return live.count(key) != 0; });
    const bool draws_wanted = entry.track >= 0 && draws[entry.track];
    if (!writes_live && !draws_wanted) continue;

    Step step{.record = i, .last_uses = {}, .finished = {}};
    for (const auto* keys : {&entry.reads, &entry.writes}) {
      for (const auto key : *keys) {
        const bool finished = still_wanted.erase(key) != 0;
        if (finished) step.finished.push_back(key);
        if ((finished || live.count(key) == 0) && !contains(step.last_uses, key)) step.last_uses.push_back(key);
      }
    }
    for (const auto key : entry.creates) live.erase(key);
    for (const auto key : entry.overwrites) live.erase(key);
    live.insert(entry.reads.begin(), entry.reads.end());
    if (entry.track >= 0) draws[entry.track] = !entry.state_before.defined();
    steps.push_back(std::move(step));
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

}  // namespace megashard::detail
