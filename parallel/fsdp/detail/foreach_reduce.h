#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "parallel/device/streams.h"
#include "parallel/fsdp/detail/comm_options.h"
#include "parallel/fsdp/detail/fsdp_param.h"

namespace megashard {

struct CommStreams;

/// Division of gradients in a reduction: inputs by `before`, then the collectives' operators, then sums by `after`.
struct DivideFactors {
  ReduceOp reduce_scatter = ReduceOp::kAvg;
  ReduceOp all_reduce = ReduceOp::kAvg;
  double before = 1;
  double after = 1;
};
/// For fp32, bf16 and fp64 the backend averages; fp16, whose sums could overflow, is divided about half before and half
/// after. `factor` replaces shard_ranks * replicas; `force_sum` divides afterwards only (_get_gradient_divide_factors
/// of torch.distributed.fsdp), as does symmetric memory, on which NCCL's kernels only sum.
DivideFactors divide_factors(int shard_ranks, int replicas, at::ScalarType reduce_dtype, std::optional<double> factor,
                             bool force_sum);

/// One group's gradients in reduction (foreach_reduce): buffers in the reduce dtype, their collectives, and the
/// destinations of the results. Also counts the ranks that had each gradient, to tell a parameter that no rank used
/// from one that some ranks did not use.
struct Reduction {
  struct Entry {
    FsdpParam* param;
    int64_t offset;  // of this rank's rows in `output`
    int64_t flags;   // offset in the last buffer's `output` of which ranks had a gradient; -1: not known
    bool mine;       // this rank had a gradient
  };
  struct Buffer {
    at::Tensor input;   // [ranks * n]: part r goes to rank r; may have the compute dtype
    at::Tensor output;  // [n]: sums over the shard group
    std::vector<Entry> entries;
    Work work;
  };
  std::vector<Buffer> buffers;  // in-place buffers, then the packed one
  DivideFactors factors;
  int64_t flags_per_param = 0;
  std::optional<c10::Stream> stream;  // produces the outputs; unset on a CPU
  StreamEvent scattered;              // after it the inputs may be reused
};

/// Arguments of a group's reduction.
struct ReduceGroup {
  const FsdpParams& params;
  const ShardLayout& layout;
  const CommOptions& comm;
  at::ScalarType dtype;
  UnusedParameters unused;
  bool has_wide_grads;  // some may have the reduce dtype already (from earlier backwards); same on all ranks
};

/// dtype of a group's reduction; without MixedPrecisionPolicy.reduce_dtype the widest of its parameters'.
at::ScalarType reduce_dtype(const FsdpParams& params, const MixedPrecisionPolicy& policy);
/// Takes the parameters' unsharded gradients. Returns no buffers if there is nothing to reduce.
Reduction pack_grads(const ReduceGroup& group, const CommStreams& streams);
/// Starts the reduce-scatters, on reduction.stream.
void reduce_scatter(Reduction& reduction, const ReduceGroup& group, const CommStreams& streams);

/// Ranks that had the gradients of a reduction: written by pack_grads, summed over ranks.
struct GradFlags {
  int64_t first = 0;          // entry.flags of the first entry
  int64_t each = 0;           // values per entry
  std::vector<float> values;  // empty if this rank had every gradient

  bool had(const Reduction::Entry& entry, int64_t rank) const { return values.at(entry.flags - first + rank) != 0; }
  bool somebody_had(const Reduction::Entry& entry) const;
};
/// Reads the flags back if this rank missed a gradient or `always`; that blocks the host on the device.
GradFlags read_flags(const Reduction& reduction, bool always);
/// Error message if a parameter had a gradient on some ranks only, else empty; same on every rank.
std::string describe_unused(const Reduction& reduction, const GradFlags& flags);

}  // namespace megashard
