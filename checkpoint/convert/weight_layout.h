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

/// Rows (of dimension 0) of a Hugging Face weight that stand in a Megatron weight.
struct RowRun {
  size_t source = 0;     ///< number in MegatronWeight::sources
  int64_t from_row = 0;  ///< first row in the source
  int64_t to_row = 0;    ///< first row in the Megatron weight
  int64_t rows = 0;
};

/// A weight under Megatron's name, and the weights under Hugging Face's names that it is made of:
/// linear_qkv of q_proj, k_proj and v_proj, head by head; linear_fc1 of gate_proj and up_proj. Rows
/// that no run names are padding: zeros, left out on the way back.
struct MegatronWeight {
  std::string name;  ///< "decoder.layers.0.self_attention.linear_qkv.weight"
  std::vector<int64_t> sizes;
  std::vector<std::string> sources;  ///< "model.layers.0.self_attn.q_proj.weight", ...
  std::vector<RowRun> runs;
  bool padded = false;  ///< a stored one may have any number of rows of padding
};

/// How a model's weights lie in Megatron's. A model family supplies it (ModelRegistry::layout).
struct WeightLayout {
  std::vector<MegatronWeight> weights;
  /// Modules of Megatron's that keep an _extra_state (of TransformerEngine); written empty, because
  /// megatron-core asks for them.
  std::vector<std::string> stateful_modules;
  /// Megatron's arguments that describe the network, for `args` of the checkpoint.
  Dict arguments;
};

/// Sizes of a source, as the runs tell them.
std::vector<int64_t> source_sizes(const MegatronWeight& weight, size_t source);

/// The Megatron weight, of the dtype of its sources; `source(i)` gives sources[i], on the CPU, one
/// at a time. Throws when sizes or dtypes are not those of the layout.
at::Tensor gather_sources(const MegatronWeight& weight, const std::function<at::Tensor(size_t source)>& source);

}  // namespace megashard
