#pragma once

#include <string>

#include "checkpoint/convert/convert.h"

namespace megashard {

/// Writes a torch_dcp folder as the one file that torch.distributed.checkpoint.format_utils'
/// dcp_to_torch_save writes: the nested state dict, for torch.load. One tensor at a time is in
/// memory. Every byte of the folder is checked first, where it has a manifest. The file appears
/// under its name whole; one that is there already is refused, or, with `overwrite`, replaced then.
void convert_dcp_to_torch(const std::string& dcp_folder, const std::string& torch_path, const ConvertProgress& progress,
                          bool overwrite = false);

}  // namespace megashard
