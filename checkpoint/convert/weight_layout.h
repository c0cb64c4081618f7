#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Rows (dimension 0) of a Hugging Face weight inside a Megatron weight.
struct RowRun {
  size_t source = 0;     ///< index in MegatronWeight::sources
  int64_t from_row = 0;  ///< first row in the source
  int64_t to_row = 0;    ///< first row in the Megatron weight
  int64_t rows = 0;
};

/// A Megatron weight and the Hugging Face weights that form it: linear_qkv of q_proj, k_proj and v_proj, head by head;
/// linear_fc1 of gate_proj and up_proj. Rows in no run are padding: zeros that are dropped on the way back.
struct MegatronWeight {
  std::string name;  ///< "decoder.layers.0.self_attention.linear_qkv.weight"
  std::vector<int64_t> sizes;
  std::vector<std::string> sources;  ///< "model.layers.0.self_attn.q_proj.weight", ...
  std::vector<RowRun> runs;
  bool padded = false;  ///< a stored weight may have any number of padding rows
};

/// Maps a model's weights to Megatron's. Supplied by the model family (ModelRegistry::layout).
struct WeightLayout {
  std::vector<MegatronWeight> weights;
  /// Megatron modules with an _extra_state (of TransformerEngine). Written empty, because megatron-core requires them.
  std::vector<std::string> stateful_modules;
  /// Megatron's arguments that describe the network, for the checkpoint's `args`.
  Dict arguments;
};

/// Sizes of a source, computed from the runs.
std::vector<int64_t> source_sizes(const MegatronWeight& weight, size_t source);

/// Assembles a Megatron weight in the dtype of its sources. `source(i)` returns sources[i] on the CPU and is called for
/// one at a time. Throws if sizes or dtypes differ from the layout.
at::Tensor gather_sources(const MegatronWeight& weight, const std::function<at::Tensor(size_t source)>& source);

}  // namespace megashard
