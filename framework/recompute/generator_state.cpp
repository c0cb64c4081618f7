#include "framework/recompute/generator_state.h"

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

}  // namespace megashard
