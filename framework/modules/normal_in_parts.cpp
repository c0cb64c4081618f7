#include "framework/modules/normal_in_parts.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <array>
#include <vector>

namespace megashard {
namespace {

constexpr int64_t kLeast = int64_t{1} << 18;  // minimum number of elements
constexpr int64_t kTogether = 16;             // numbers of 16 draws in LibTorch; a remainder draws 16 again
constexpr size_t kState = at::MERSENNE_STATE_N, kAhead = at::MERSENNE_STATE_M;

/// The next state of MT19937 (Matsumoto and Nishimura, 1998).
void regenerate(std::array<uint32_t, kState>& state) {
  const auto next = [](uint32_t high, uint32_t low, uint32_t ahead) {
    return ahead ^ (((high & 0x80000000U) | (low & 0x7fffffffU)) >> 1) ^ ((low & 1U) != 0 ? 0x9908b0dfU : 0U);
  };
  for (size_t i = 0; i < kState - kAhead; ++i) state[i] = next(state[i], state[i + 1], state[i + kAhead]);
  for (size_t i = kState - kAhead; i + 1 < kState; ++i)
    state[i] = next(state[i], state[i + 1], state[i + kAhead - kState]);
  state[kState - 1] = next(state[kState - 1], state[0], state[kAhead - 1]);
}

void skip(at::mt19937& engine, int64_t draws) {
  auto data = engine.data();
  while (draws >= data.left_) {  // the last number left belongs to the next state
    draws -= data.left_;
    regenerate(data.state_);
    data.left_ = static_cast<int>(kState);
    data.next_ = 1;
  }
  data.left_ -= static_cast<int>(draws);
  data.next_ += static_cast<uint32_t>(draws);
  engine.set_data(data);
}

at::CPUGeneratorImpl& engine_of(const at::Generator& generator) {
  return *at::check_generator<at::CPUGeneratorImpl>(generator);
}

}  // namespace

bool normal_in_parts_(const at::Tensor& tensor, double mean, double std, at::Generator& generator) {
  const int64_t threads = at::get_num_threads(), size = tensor.numel();
  if (threads == 1 || size < kLeast || !tensor.is_cpu() || tensor.scalar_type() != at::kFloat ||
      !tensor.is_contiguous()) {
    return false;
  }
  const int64_t part = size / threads / kTogether * kTogether;  // the last part also gets the remainder
  std::vector<at::Generator> generators;
  auto engine = engine_of(generator).engine();
  for (int64_t i = 0; i < threads; ++i) {
    generators.push_back(generator.clone());
    engine_of(generators.back()).set_engine(engine);
    if (i + 1 < threads) skip(engine, part);
  }
  const auto flat = tensor.view({-1});
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto numbers = flat.slice(0, i * part, i + 1 < threads ? (i + 1) * part : size);
      numbers.normal_(mean, std, generators[i]);
    }
  });
  engine_of(generator).set_engine(engine_of(generators.back()).engine());
  return true;
}

}  // namespace megashard
