#pragma once

#include <string>

#include "checkpoint/convert/convert.h"

namespace megashard {

/// Converts the nested state dict of a torch.save file to the torch_dcp folder that torch_save_to_dcp of
/// torch.distributed.checkpoint.format_utils writes, with one data file. Views and shared storages are read as separate
/// tensors, one in memory at a time. Nothing in the file is executed. The folder appears atomically. An existing one is
/// refused, or replaced with all its contents with `overwrite`.
void convert_torch_to_dcp(const std::string& torch_path, const std::string& dcp_folder, const ConvertProgress& progress,
                          bool overwrite = false);

/// Converts a torch_dcp folder to the single file that dcp_to_torch_save of torch.distributed.checkpoint.format_utils
/// writes: the nested state dict, for torch.load. Holds one tensor in memory at a time. Verifies every byte of the
/// folder first if it has a manifest. The file appears atomically. An existing one is refused, or replaced with
/// `overwrite`.
void convert_dcp_to_torch(const std::string& dcp_folder, const std::string& torch_path, const ConvertProgress& progress,
                          bool overwrite = false);

}  // namespace megashard
