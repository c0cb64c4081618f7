#include "framework/modules/deferred_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "framework/recompute/generator_state.h"

namespace megashard::detail {

GeneratorTrack::GeneratorTrack(at::Generator generator)
    : original(std::move(generator)), initial(generator_state(original)), known(initial) {}

void GeneratorTrack::observe() {
  auto now = generator_state(original);
  if (same_generator_state(now, known)) return;
  if (drawn) {
    const auto fresh = at::make_generator<at::CPUGeneratorImpl>(original.current_seed());
    TORCH_CHECK(same_generator_state(now, generator_state(fresh)),
                "random numbers were drawn beside the recorded operations while a module was constructed deferred (by "
                "a thread of its own, or by a C++ engine): an ordinary construction would have other weights; draw "
                "them by tensor operations on the constructing thread");
  }
  known = pending = std::move(now);
  drawn = false;
}

void GeneratorTrack::mark_drawn() {
  {
    const std::lock_guard<std::mutex> lock(original.mutex());
    original.get<at::CPUGeneratorImpl>()->random();
  }
  known = generator_state(original);
  drawn = true;
}

}  // namespace megashard::detail
