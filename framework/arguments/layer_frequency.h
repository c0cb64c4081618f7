#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// True for the layers that --moe-layer-freq gives experts (Megatron's moe_layer_freq). It is N: layers 0, N, 2 N, ...;
/// or 0 and 1 for each layer, as sums and products of Python lists: "[0]*1+[1]*26", "([0,1])*13". Throws UsageError if
/// it is neither, or describes another number of layers.
std::vector<bool> expand_layer_frequency(const std::string& frequency, int64_t num_layers);

}  // namespace megashard
