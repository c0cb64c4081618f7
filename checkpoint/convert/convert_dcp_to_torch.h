#pragma once

#include <string>

#include "checkpoint/convert/convert.h"

namespace megashard {

/// Converts a torch_dcp folder to the single file that dcp_to_torch_save of torch.distributed.checkpoint.format_utils
/// writes: the nested state dict, for torch.load. Holds one tensor in memory at a time. Verifies every byte of the
/// folder first if it has a manifest. The file appears atomically. An existing one is refused, or replaced with
/// `overwrite`.
void convert_dcp_to_torch(const std::string& dcp_folder, const std::string& torch_path, const ConvertProgress& progress,
                          bool overwrite = false);

}  // namespace megashard
