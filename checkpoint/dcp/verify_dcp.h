#pragma once

#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/verify_archive.h"

namespace megashard {

/// Verifies every byte of a step's folder except its manifest; `entries` are its tensors, from DcpReader. Checks each
/// item against its CRC-32 and the metadata, that chunks tile their tensors, and that items do not overlap (except keys
/// of one tensor).
CheckedBytes verify_dcp(const std::string& folder, const std::vector<DcpEntry>& entries, const FaultSink& fault);

}  // namespace megashard
