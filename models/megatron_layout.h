#pragma once

#include <cstdint>

#include "checkpoint/convert/tensor_stream.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// Location of the weights of Llama, Qwen2 and Qwen3 in megatron-core's GPTModel, by the names of its distributed
/// checkpoints (the TransformerEngine spec's, to which the local spec maps its own). linear_qkv has, for each group of
/// heads that share a key, the query heads, the key and the value; linear_fc1 has gate, then up. Layer norms belong to
/// the linear layer after them. The vocabulary is padded to a multiple of `vocab_divisor`
/// (--make-vocab-size-divisible-by times tensor parallel size). Throws for networks that GPTModel has no switches for.
MegatronLayout megatron_layout(const DecoderConfig& config, int64_t vocab_divisor);

}  // namespace megashard
