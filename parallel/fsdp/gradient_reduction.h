#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/comm_streams.h"
#include "parallel/fsdp/fsdp_param.h"
#include "parallel/fsdp/gradient_scaling.h"

namespace megashard {

/// One group's gradients on their way: buffers in the reduce dtype, the collectives that run on
/// them, and what to do with the results.
struct GradientReduction {
  struct Entry {
    FsdpParam* param;
    int64_t offset;  // of this rank's rows in `output`
    int64_t flags;   // in the last buffer's `output`: which ranks had a gradient; -1: not known
    bool mine;       // this rank had one
  };
  struct Buffer {
    at::Tensor input;   // [ranks * n], rank r's part is what rank r receives
    at::Tensor output;  // [n]: sums over the shard group
    std::vector<Entry> entries;
    Work work;
  };
  std::vector<Buffer> buffers;
  GradientScaling scaling;
  std::optional<c10::Stream> stream;  // where the outputs are made; none on a CPU
  StreamEvent scattered;              // the inputs may be reused
};

}  // namespace megashard
