#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/values/torch_archive.h"

namespace megashard {

/// Receives one fault: the file, the item and the reason.
using FaultSink = std::function<void(const std::string& fault)>;

/// Number of bytes checked.
struct CheckedBytes {
  int64_t bytes = 0;
  int64_t without_checksum = 0;  ///< bytes read that have no checksum

  CheckedBytes& operator+=(const CheckedBytes& part) {
    bytes += part.bytes;
    without_checksum += part.without_checksum;
    return *this;
  }
};

/// Checks the archive's entries against their CRC-32. `item` names it in faults.
CheckedBytes verify_archive(const TorchArchive& archive, const std::string& item, const FaultSink& fault);

}  // namespace megashard
