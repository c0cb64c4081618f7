#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

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

}  // namespace megashard::detail
