#pragma once

#include <optional>
#include <string>

namespace megashard {

/// What a step's folder is, by Megatron's names (--ckpt-format).
enum class CheckpointFormat {
  kTorchDcp,   ///< torch.distributed.checkpoint: .metadata, *.distcp
  kTorchDist,  ///< megatron.core.dist_checkpointing: these, common.pt and metadata.json
};

const char* format_name(CheckpointFormat format);          ///< "torch_dcp", "torch_dist"
CheckpointFormat format_of_name(const std::string& name);  ///< throws for other names

/// The format of a step's folder, as Megatron tells them apart: metadata.json names its backend;
/// mp_rank_00* is the legacy `torch`, which throws a sentence (as zarr and fsdp_dtensor do);
/// .metadata alone is torch_dcp. Throws when there is none of them: no checkpoint, or one whose
/// save was cut short.
CheckpointFormat detect_format(const std::string& folder);

/// Throws when `folder` is of another format than `expected`, naming the flag to set.
void expect_format(const std::string& folder, CheckpointFormat expected);

}  // namespace megashard
