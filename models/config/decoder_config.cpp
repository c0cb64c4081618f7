#include "models/config/decoder_config.h"

#include <algorithm>

namespace megashard {
namespace {

bool contains(const std::vector<int64_t>& layers, int64_t layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

}  // namespace

bool MoeConfig::is_sparse(int64_t layer) const {
  return num_experts > 0 && !contains(dense_layers, layer) && (layer + 1) % sparse_step == 0;
}

bool DecoderConfig::is_sliding(int64_t layer) const { return sliding_window > 0 && contains(sliding_layers, layer); }

}  // namespace megashard
