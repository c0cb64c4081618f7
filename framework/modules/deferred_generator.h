#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace megashard::detail {

/// One generator of the construction. It is not advanced while recording; the replay advances a
/// clone of it.
struct GeneratorTrack {
  explicit GeneratorTrack(at::Generator generator);

  /// Notices that the generator was re-seeded since it was last looked at. Throws when numbers were
  /// drawn from it beside the tape.
  void observe();
  /// Moves the real generator a little, so that seeding it again is seen even when the seed is the
  /// same.
  void mark_drawn();

  at::Generator original;
  at::Tensor initial;  // state where the tape begins
  at::Tensor known;    // state of `original` when last looked at
  at::Tensor pending;  // set: the next draw starts from here, whatever the recorded ones leave
  bool drawn = false;  // an ordinary construction would have advanced `original` by now
};

}  // namespace megashard::detail
