#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <span>

#include "parallel/updates/adamw_table.h"

namespace megashard {

/// AdamW step (torch.optim.AdamW) over all pieces; sets their first_tile and vectors. Gradients are multiplied by
/// `factor` when read and are not modified. CUDA: asynchronous on the current stream, one kernel launch per
/// AdamWTable::kCapacity pieces.
void adamw_step(std::span<AdamWPiece> pieces, const AdamWNumbers& numbers, c10::Device device);

/// Calls `launch` with the tables of adamw_step's launches, in order.
void make_adamw_tables(std::span<AdamWPiece> pieces, const AdamWNumbers& numbers,
                       const std::function<void(const AdamWTable&)>& launch);

}  // namespace megashard
