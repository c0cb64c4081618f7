#include "framework/training/random_states.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/values/value_tensors.h"
#include "framework/recompute/call_state.h"

namespace megashard {
namespace {

std::vector<std::pair<const char*, at::Generator>> generators(c10::Device device) {
  std::vector<std::pair<const char*, at::Generator>> named{
      {"torch_rng_state", at::globalContext().defaultGenerator(c10::kCPU)}};
  if (!device.is_cpu()) named.emplace_back("cuda_rng_state", at::globalContext().defaultGenerator(device));
  return named;
}

}  // namespace

Dict random_states(c10::Device device) {
  Dict states;
  for (const auto& [name, generator] : generators(device)) {
    const at::Tensor state = generator_state(generator);
    states.set(name, Bytes{std::string(static_cast<const char*>(state.const_data_ptr()), state.nbytes())});
  }
  return states;
}

bool restore_random_states(const Dict& states, c10::Device device) {
  std::vector<std::pair<at::Generator, at::Tensor>> restored;
  for (const auto& [name, generator] : generators(device)) {
    const Value* saved = states.find(name);
    const auto bytes = saved == nullptr ? std::nullopt : bytes_in(*saved);
    if (!bytes || bytes->size() != generator_state(generator).nbytes()) return false;
    at::Tensor state = at::empty({static_cast<int64_t>(bytes->size())}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), bytes->data(), bytes->size());
    restored.emplace_back(generator, state);
  }
  for (auto& [generator, state] : restored) set_generator_state(generator, state);
  return true;
}

void seed_random_states(uint64_t seed, c10::Device device) {
  for (auto& [name, generator] : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

}  // namespace megashard
