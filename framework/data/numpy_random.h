#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>

namespace megashard {

/// The part of numpy.random.RandomState(seed) that datasets need: the legacy MT19937 generator and its Fisher-Yates
/// shuffle. Consecutive shuffles continue the same stream, as in numpy.
class NumpyRandomState {
 public:
  /// Throws if `seed` is not in [0, 2^32), numpy's limit.
  explicit NumpyRandomState(int64_t seed);

  /// numpy's random_interval: uniform in [0, max] by masking and redrawing.
  uint64_t interval(uint64_t max);

  template <typename T>
  void shuffle(std::span<T> values) {
    for (size_t i = values.size(); i-- > 1;) {
      std::swap(values[i], values[interval(i)]);
    }
  }

 private:
  std::mt19937 generator_;
};

/// numpy.sum of contiguous doubles: pairwise summation, which differs from a plain loop for eight or more values. Blend
/// weights are divided by it.
double numpy_sum(std::span<const double> values);

}  // namespace megashard
