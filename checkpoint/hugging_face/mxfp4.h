#pragma once

#include <memory>

#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

/// Shows weights in MXFP4 as bf16 tensors, as transformers dequantises them (convert_moe_packed_tensors). In the files
/// NAME_blocks [E, R, B, 16] uint8 has 4-bit values of blocks of 32, and NAME_scales [E, R, B] uint8 the blocks'
/// exponents; NAME is [E, 32 B, R]. Returns `files` if none has that form.
std::unique_ptr<CheckpointReader> dequantise_mxfp4(std::unique_ptr<CheckpointReader> files);

}  // namespace megashard
