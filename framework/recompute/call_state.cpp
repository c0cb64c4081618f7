#include "framework/recompute/call_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace megashard {

at::Tensor generator_state(const at::Generator& generator) {
  auto handle = generator;
  const std::lock_guard<std::mutex> lock(handle.mutex());
  return handle.get_state();
}

void set_generator_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

bool same_generator_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

namespace {

at::ThreadLocalState thread_state_with_grad() {
  at::ThreadLocalState state;
  state.set_grad_mode(true);
  return state;
}

bool autocast_is_on() {
  return at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA);
}

}  // namespace

CallState::CallState(const std::vector<at::Tensor>& inputs, bool rng, const std::vector<at::Generator>& generators)
    : thread_state_(thread_state_with_grad()) {
  if (!rng) return;
  std::vector<at::Generator> used = generators;
  const auto use = [&used](const at::Generator& generator) {
    if (std::find(used.begin(), used.end(), generator) == used.end()) used.push_back(generator);
  };
  use(at::detail::getDefaultCPUGenerator());
  for (const auto& input : inputs) {
    if (input.defined() && (input.is_cuda() || input.is_xpu())) {
      use(at::globalContext().defaultGenerator(input.device()));
    }
  }
  for (const auto& generator : used) generators_.emplace_back(generator, generator_state(generator));
}

CallState::Replayed::Replayed(const CallState& state) : thread_state_(state.thread_state_) {
  for (auto [generator, before_call] : state.generators_) {
    before_.emplace_back(generator, generator_state(generator));
    set_generator_state(generator, before_call);
  }
}

CallState::Replayed::~Replayed() {
  for (auto& [generator, before] : before_) set_generator_state(generator, before);
  // Later steps must not reuse weights cast in this run, because they may have changed.
  if (autocast_is_on()) at::autocast::clear_cache();
}

}  // namespace megashard
