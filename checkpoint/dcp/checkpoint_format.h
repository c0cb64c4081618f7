#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace megashard {

/// What a step's folder is, by Megatron's names (--ckpt-format).
enum class CheckpointFormat {
  kTorchDcp,   ///< torch.distributed.checkpoint: .metadata, *.distcp
  kTorchDist,  ///< megatron.core.dist_checkpointing: these, common.pt and metadata.json
};

// The files of a step's folder; manifest.h has its own.
inline constexpr const char* kDcpMetadataFile = ".metadata";
inline constexpr const char* kCommonFile = "common.pt";      ///< of torch_dist: what is not cut
inline constexpr const char* kFormatFile = "metadata.json";  ///< of torch_dist: its name, last
/// The data of a rank, or of a converter's file.
inline std::string data_file_name(int64_t number) { return "__" + std::to_string(number) + "_0.distcp"; }

const char* format_name(CheckpointFormat format);          ///< "torch_dcp", "torch_dist"
CheckpointFormat format_of_name(const std::string& name);  ///< throws for other names

/// The sharded_backend that the content of a metadata.json names. `where`, its path, begins the
/// messages of errors: for damaged ones, and for versions that are not known.
std::string parse_sharded_backend(std::string_view text, const std::string& where);

/// The format of a step's folder, as Megatron tells them apart: metadata.json names its backend;
/// mp_rank_00* is the legacy `torch`, which throws (as zarr and fsdp_dtensor do);
/// .metadata alone is torch_dcp. Throws when there is none of them: no checkpoint, or one whose
/// save was cut short.
CheckpointFormat detect_format(const std::string& folder);

/// Throws when `folder` is of another format than `expected`, naming the flag to set.
void expect_format(const std::string& folder, CheckpointFormat expected);

}  // namespace megashard
