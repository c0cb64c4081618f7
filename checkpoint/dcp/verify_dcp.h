#pragma once

#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/verify_archive.h"

namespace megashard {

/// Every byte of a step's folder but those of its manifest: `entries` are its tensors, as DcpReader
/// has them. Each item against its CRC-32 and what the metadata says of it; whether the chunks of each
/// tensor tile it; and that no byte belongs to two items, but for keys of one tensor.
CheckedBytes verify_dcp(const std::string& folder, const std::vector<DcpEntry>& entries, const FaultSink& fault);

}  // namespace megashard
