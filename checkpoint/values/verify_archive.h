#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/values/torch_archive.h"

namespace megashard {

/// Takes one fault: the file, the item, and what is wrong with it.
using FaultSink = std::function<void(const std::string& fault)>;

/// How much was checked.
struct CheckedBytes {
  int64_t bytes = 0;
  int64_t without_checksum = 0;  ///< of these: read, but nothing says what they should be

  CheckedBytes& operator+=(const CheckedBytes& part) {
    bytes += part.bytes;
    without_checksum += part.without_checksum;
    return *this;
  }
};

/// The archive's entries against their CRC-32. `item` names it in faults.
CheckedBytes verify_archive(const TorchArchive& archive, const std::string& item, const FaultSink& fault);

}  // namespace megashard
