#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <span>

#include "parallel/updates/adamw_table.h"

namespace megashard {

/// AdamW (torch.optim.AdamW) over all pieces, whose first_tile and vectors are set here. A gradient is multiplied by
/// `factor` as it is read, and stays as it is. CUDA: on the current stream, one kernel launch for up to
/// AdamWTable::kCapacity pieces, without waiting for the device.
void adamw_step(std::span<AdamWPiece> pieces, const AdamWNumbers& numbers, c10::Device device);

/// The launches that adamw_step makes of its pieces, in order.
void make_adamw_tables(std::span<AdamWPiece> pieces, const AdamWNumbers& numbers,
                       const std::function<void(const AdamWTable&)>& launch);

}  // namespace megashard
