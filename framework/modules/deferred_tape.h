#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "framework/modules/deferred_generator.h"
#include "framework/modules/deferred_value.h"

namespace megashard::detail {

/// One recorded operation. Pure views are not recorded: arguments carry their own geometry.
struct Record {
  c10::OperatorHandle op;
  std::vector<TapeValue> arguments;
  std::vector<TapeValue> results;
  std::vector<StorageKey> reads;       // arguments' storages whose earlier contents matter
  std::vector<StorageKey> writes;      // storages that it changes, overwrites or creates
  std::vector<StorageKey> creates;     // of `writes`: new with this operation
  std::vector<StorageKey> overwrites;  // of `writes`: nothing of the earlier contents is left
  int track = -1;                      // which generator it draws from; -1: none
  int generator_argument = -1;         // -1: it has none, and draws from the default generator
  at::Tensor state_before;             // set: the generator was re-seeded just before
};

/// One operation to be replayed.
struct Step {
  size_t record = 0;
  std::vector<StorageKey> last_uses;  ///< no later operation needs these contents
  std::vector<StorageKey> finished;   ///< of last_uses: wanted, and no later operation touches them
};

class Replay;

class Tape {
 public:
  explicit Tape(at::Generator default_generator);

  /// What the dispatcher calls instead of the operator, under a DeferredInit.
  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  void begin_recording();
  void end_recording() noexcept;
  /// Puts the generators where an ordinary construction leaves them, or, when not all was drawn,
  /// where they were; but not those that were seeded or drawn from since.
  void leave_generators(Replay& replay, bool all_drawn);
  std::string last_allocation() const;  ///< "aten::empty [4, 3]", for messages

  bool made(StorageKey storage) const { return storages_.count(storage) != 0; }
  /// Whether anything but an allocation ever wrote it.
  bool is_set(StorageKey storage) const { return storages_.at(storage); }
  const std::vector<Record>& records() const { return records_; }
  const std::vector<GeneratorTrack>& tracks() const { return tracks_; }
  const std::string& disturbance() const { return disturbance_; }

  /// The records that produce `wanted` and, where draws[t], everything drawn from generator t; in
  /// order.
  std::vector<Step> plan(const std::unordered_set<StorageKey>& wanted, std::vector<bool> draws) const;

 private:
  struct Call;
  void record(const Call& call, const torch::jit::Stack& results);
  void run_on_meta(Call& call, torch::jit::Stack& stack);
  void run_now(const Call& call, torch::jit::Stack& stack);
  int track_of(const c10::IValue& generator);
  void check_known(const TapeValue& value, const std::string& op_name) const;

  std::vector<Record> records_;
  std::vector<GeneratorTrack> tracks_;             // [0] stands for the default generator
  std::unordered_map<StorageKey, bool> storages_;  // made under the tape; true: initialised
  std::string disturbance_;
};

}  // namespace megashard::detail
