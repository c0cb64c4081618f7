#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "checkpoint/values/value.h"

namespace megashard {

/// The random states that a run on `device` draws from, by Megatron's names: torch_rng_state, and
/// of a GPU cuda_rng_state. Bytes, as torch.get_rng_state() has them.
Dict random_states(c10::Device device);
/// From bytes, or from the uint8 tensors of torch.get_rng_state() that Megatron keeps; what else
/// `states` holds (Python's, numpy's) is not looked at. False, with nothing changed, when one is
/// missing or of another size, as after a change of the device.
bool restore_random_states(const Dict& states, c10::Device device);
/// Seeds the same generators.
void seed_random_states(uint64_t seed, c10::Device device);

}  // namespace megashard
