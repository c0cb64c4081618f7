#include "framework/data/numpy_random.h"

#include <c10/util/Exception.h>

#include <array>
#include <bit>

namespace megashard {
namespace {

constexpr size_t kLanes = 8;
constexpr size_t kBlock = 128;

double sum_block(std::span<const double> values) {
  std::array<double, kLanes> lane;
  for (size_t k = 0; k < kLanes; ++k) lane[k] = values[k];
  const size_t whole = values.size() - values.size() % kLanes;
  for (size_t i = kLanes; i < whole; i += kLanes)
    for (size_t k = 0; k < kLanes; ++k) lane[k] += values[i + k];
  double sum = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
  for (size_t i = whole; i < values.size(); ++i) sum += values[i];
  return sum;
}

}  // namespace

NumpyRandomState::NumpyRandomState(int64_t seed) : generator_(static_cast<uint32_t>(seed)) {
  TORCH_CHECK(seed >= 0 && seed <= 0xffffffffLL, "the data seed must lie in [0, 2^32 - 1], got ", seed,
              "; choose another --seed");
}

uint64_t NumpyRandomState::interval(uint64_t max) {
  if (max == 0) return 0;
  const uint64_t mask = ~uint64_t{0} >> std::countl_zero(max);
  uint64_t value = 0;
  do {
    value = generator_();
    if (max > 0xffffffffULL) value = (value << 32) | generator_();
    value &= mask;
  } while (value > max);
  return value;
}

double numpy_sum(std::span<const double> values) {
  if (values.size() < kLanes) {
    double sum = 0.0;
    for (double value : values) sum += value;
    return sum;
  }
  if (values.size() <= kBlock) return sum_block(values);
  const size_t half = values.size() / 2 - (values.size() / 2) % kLanes;
  return numpy_sum(values.first(half)) + numpy_sum(values.subspan(half));
}

}  // namespace megashard
