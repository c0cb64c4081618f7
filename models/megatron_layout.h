#pragma once

#include <cstdint>

#include "checkpoint/convert/weight_layout.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// Where the weights of Llama, Qwen2 and Qwen3 lie in megatron-core's GPTModel, by the names of its
/// distributed checkpoints (those of the TransformerEngine spec, which the local spec maps its own
/// to). linear_qkv holds, for each group of heads that share a key, the query heads, then key, then
/// value; linear_fc1 the gate, then up. Layer norms belong to the linear behind them. The
/// vocabulary gets rows until `vocab_divisor` divides it (--make-vocab-size-divisible-by times
/// tensor parallel size). Throws for networks that GPTModel has no switches for.
WeightLayout megatron_layout(const DecoderConfig& config, int64_t vocab_divisor);

}  // namespace megashard
