#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "framework/modules/deferred_value.h"

namespace megashard::detail {

/// One generator used by the construction. Recording does not advance it; the replay advances a clone.
struct GeneratorTrack {
  explicit GeneratorTrack(at::Generator generator);

  /// Detects that the generator was re-seeded since the last call. Throws if numbers were drawn outside the tape.
  void observe();
  /// Advances the real generator a little, so that re-seeding is detected even with the same seed.
  void mark_drawn();

  at::Generator original;
  at::Tensor initial;  // state at the beginning of the tape
  at::Tensor known;    // last observed state of `original`
  at::Tensor pending;  // if set, the next draw starts from this state
  bool drawn = false;  // ordinary construction would have advanced `original`
};

/// One recorded operation. Pure views are not recorded: arguments carry their own geometry.
struct Record {
  c10::OperatorHandle op;
  std::vector<TapeValue> arguments;
  std::vector<TapeValue> results;
  std::vector<StorageKey> reads;       // storages of arguments whose contents are used
  std::vector<StorageKey> writes;      // storages that it changes, overwrites or creates
  std::vector<StorageKey> creates;     // subset of `writes`: created by this operation
  std::vector<StorageKey> overwrites;  // subset of `writes`: replaced completely
  int track = -1;                      // generator that it draws from; -1: none
  int generator_argument = -1;         // -1: none; draws from the default generator
  at::Tensor state_before;             // if set, the generator was re-seeded before
};

/// One operation to be replayed.
struct Step {
  size_t record = 0;
  std::vector<StorageKey> last_uses;  ///< contents that no later operation needs
  std::vector<StorageKey> finished;   ///< subset of last_uses: requested and not used later
};

class Replay;

class Tape {
 public:
  explicit Tape(at::Generator default_generator);

  /// Called by the dispatcher instead of the operator, under a DeferredInit.
  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  void begin_recording();
  void end_recording() noexcept;
  /// Sets the generators to the state after an ordinary construction, or, if not everything was drawn, to their earlier
  /// state. Skips generators that were seeded or used since.
  void leave_generators(Replay& replay, bool all_drawn);
  std::string last_allocation() const;  ///< "aten::empty [4, 3]", for messages

  bool made(StorageKey storage) const { return storages_.count(storage) != 0; }
  /// True if it was written by more than an allocation.
  bool is_set(StorageKey storage) const { return storages_.at(storage); }
  const std::vector<Record>& records() const { return records_; }
  const std::vector<GeneratorTrack>& tracks() const { return tracks_; }
  const std::string& disturbance() const { return disturbance_; }

  /// The records that produce `wanted` and, for generators t with draws[t], everything drawn from them; in order.
  std::vector<Step> plan(const std::unordered_set<StorageKey>& wanted, std::vector<bool> draws) const;

 private:
  struct Call;
  void record(const Call& call, const torch::jit::Stack& results);
  void run_on_meta(Call& call, torch::jit::Stack& stack);
  void run_now(const Call& call, torch::jit::Stack& stack);
  int track_of(const c10::IValue& generator);
  void check_known(const TapeValue& value, const std::string& op_name) const;

  std::vector<Record> records_;
  std::vector<GeneratorTrack> tracks_;             // [0] is the default generator
  std::unordered_map<StorageKey, bool> storages_;  // created under the tape; true: initialised
  std::string disturbance_;
};

}  // namespace megashard::detail
