#pragma once

#include <cstdint>
#include <string>

namespace megashard {

/// The files of a step's folder; manifest.h has its own.
inline constexpr const char* kDcpMetadataFile = ".metadata";
inline constexpr const char* kCommonFile = "common.pt";      ///< of torch_dist: what is not cut
inline constexpr const char* kFormatFile = "metadata.json";  ///< of torch_dist: its name, last

/// The data of a rank, or of a converter's file.
inline std::string data_file_name(int64_t number) {
  return "__" + std::to_string(number) + "_0.distcp";
}

}  // namespace megashard
