#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>

namespace megashard {

/// numpy.random.RandomState(seed), as far as datasets need it: the legacy MT19937 generator and its
/// Fisher-Yates shuffle. Consecutive shuffles continue one stream, as in numpy.
class NumpyRandomState {
 public:
  /// `seed` must lie in [0, 2^32), numpy's own limit.
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

/// numpy.sum of contiguous doubles: pairwise summation, which differs from a plain loop from eight
/// values on. Blend weights are divided by it.
double numpy_sum(std::span<const double> values);

}  // namespace megashard
