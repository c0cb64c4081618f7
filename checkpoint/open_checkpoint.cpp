#include "checkpoint/open_checkpoint.h"

#include "checkpoint/torch_dist/torch_dist_reader.h"

namespace megashard {

std::unique_ptr<DcpReader> open_step(const std::string& folder) {
  const auto format = detect_format(folder);
  const bool is_dist = format == CheckpointFormat::kTorchDist;
  return std::make_unique<DcpReader>(folder, format,
                                     is_dist ? read_torch_dist_metadata(folder) : read_dcp_metadata(folder));
}

}  // namespace megashard
