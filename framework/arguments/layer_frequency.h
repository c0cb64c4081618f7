#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// A flag that selects layers by an interval N, and which ones: of each run of N layers the first, the last, or all but
/// the last.
struct LayerFlag {
  enum class Selects { kFirst, kLast, kAllButLast };
  const char* name;
  Selects selects;
};
inline constexpr LayerFlag kMoeLayerFreq{"--moe-layer-freq", LayerFlag::Selects::kFirst};
inline constexpr LayerFlag kNoRopeFreq{"--no-rope-freq", LayerFlag::Selects::kLast};
inline constexpr LayerFlag kWindowAttnSkipFreq{"--window-attn-skip-freq", LayerFlag::Selects::kAllButLast};

/// True for the layers that are selected, by an interval or by 0 and 1 for each layer, as sums and products of Python
/// lists: "[0]*1+[1]*26", "([0,1])*13". Throws UsageError if `frequency` is neither, or describes another number of
/// layers.
std::vector<bool> expand_layer_frequency(const LayerFlag& flag, const std::string& frequency, int64_t num_layers);

}  // namespace megashard
