#pragma once

#include <string>

#include "checkpoint/convert/convert.h"

namespace megashard {

/// Writes the nested state dict of a torch.save file as the torch_dcp folder that
/// torch.distributed.checkpoint.format_utils' torch_save_to_dcp writes, in one data file. Views and
/// shared storages are read as the tensors they are; one tensor at a time is in memory. Nothing of
/// the file is executed. The folder appears whole; one that is there already is refused, or, with
/// `overwrite`, replaced then with all that is in it.
void convert_torch_to_dcp(const std::string& torch_path, const std::string& dcp_folder, const ConvertProgress& progress,
                          bool overwrite = false);

}  // namespace megashard
