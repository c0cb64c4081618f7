#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "framework/modules/deferred_tape.h"

namespace megashard {

/// As tensor.normal_(mean, std, generator), with all of LibTorch's threads: same numbers and final generator state.
/// Returns false and does nothing if it is not faster (one thread, few numbers) or not possible (not contiguous fp32 on
/// a CPU).
bool normal_in_parts_(const at::Tensor& tensor, double mean, double std, at::Generator& generator);

}  // namespace megashard

namespace megashard::detail {

/// Executes records on real CPU tensors.
class Replay {
 public:
  explicit Replay(const Tape& tape);

  void run(const Record& record);
  /// The real tensor of a recorded one, whose storage must be live.
  at::Tensor tensor(const TapeTensor& recorded) const;
  c10::IValue value(const TapeValue& recorded) const;
  void drop(StorageKey storage);
  /// Calls `op`, which draws from generator `track`, as its argument or as the default generator.
  void call_drawing(const c10::OperatorHandle& op, int track, int generator_argument, torch::jit::Stack& stack);

  at::Generator& generator(int track) { return generators_[track]; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t operations() const { return operations_; }

 private:
  void bind(StorageKey recorded, const c10::Storage& real);
  void bind_results(const Record& record, const torch::jit::Stack& stack);

  std::unordered_map<StorageKey, c10::Storage> live_;
  std::vector<at::Generator> generators_;  // clones, by track
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t operations_ = 0;
};

}  // namespace megashard::detail
