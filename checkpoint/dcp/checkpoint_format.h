#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace megashard {

/// Format of a step's folder, with Megatron's names (--ckpt-format).
enum class CheckpointFormat {
  kTorchDcp,   ///< torch.distributed.checkpoint: .metadata, *.distcp
  kTorchDist,  ///< megatron.core.dist_checkpointing: also common.pt and metadata.json
};

// Files of a step's folder; see also manifest.h.
inline constexpr const char* kDcpMetadataFile = ".metadata";
inline constexpr const char* kCommonFile = "common.pt";      ///< torch_dist: plain values that are not sharded
inline constexpr const char* kFormatFile = "metadata.json";  ///< torch_dist: names the format; written last
/// Name of the data file of a rank, or of a converter.
inline std::string data_file_name(int64_t number) { return "__" + std::to_string(number) + "_0.distcp"; }

const char* format_name(CheckpointFormat format);          ///< "torch_dcp", "torch_dist"
CheckpointFormat format_of_name(const std::string& name);  ///< throws for other names

/// The sharded_backend in the content of a metadata.json. Throws for damaged files and unknown versions; messages begin
/// with `where`, its path.
std::string parse_sharded_backend(std::string_view text, const std::string& where);

/// Detects the format of a step's folder as Megatron does: metadata.json names its backend; mp_rank_00* is the legacy
/// `torch` format, which throws (so do zarr and fsdp_dtensor); .metadata alone is torch_dcp. Throws if there is none of
/// them: not a checkpoint, or an interrupted save.
CheckpointFormat detect_format(const std::string& folder);

/// Throws an error that names the flag to set if `folder` has another format than `expected`.
void expect_format(const std::string& folder, CheckpointFormat expected);

}  // namespace megashard
