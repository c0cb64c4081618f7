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

/// How a reduction divides gradients: inputs by `before`, then the operators, then the sums by `after`.
struct DivideFactors {
  ReduceOp reduce_scatter = ReduceOp::kAvg;
  ReduceOp all_reduce = ReduceOp::kAvg;
  double before = 1;
  double after = 1;
};
/// fp32, bf16 and fp64 are averaged by the backend; fp16, whose sums could overflow, is divided about half before and
/// half after. `factor` replaces shard_ranks * replicas; `force_sum` divides afterwards only
/// (_get_gradient_divide_factors of torch.distributed.fsdp), as symmetric memory does, too: NCCL's kernels on it sum.
DivideFactors divide_factors(int shard_ranks, int replicas, at::ScalarType reduce_dtype, std::optional<double> factor,
                             bool force_sum);

/// One group's gradients on their way (foreach_reduce): buffers in the reduce dtype, the collectives that run on them,
/// and what to do with the results. A reduction also counts the ranks that had each gradient, which tells a parameter
/// that nobody used from one that some ranks did not use.
struct Reduction {
  struct Entry {
    FsdpParam* param;
    int64_t offset;  // of this rank's rows in `output`
    int64_t flags;   // in the last buffer's `output`: which ranks had a gradient; -1: not known
    bool mine;       // this rank had one
  };
  struct Buffer {
    at::Tensor input;   // [ranks * n], rank r's part is what rank r receives; its dtype may be the computation's
    at::Tensor output;  // [n]: sums over the shard group
    std::vector<Entry> entries;
    Work work;
  };
  std::vector<Buffer> buffers;  // those that are reduced where they lie, then the packed one
  DivideFactors factors;
  int64_t flags_per_param = 0;
  std::optional<c10::Stream> stream;  // where the outputs are made; none on a CPU
  StreamEvent scattered;              // the inputs may be reused
};

/// What is reduced, and how.
struct ReduceGroup {
  const FsdpParams& params;
  const ShardLayout& layout;
  const CommOptions& comm;
  at::ScalarType dtype;
  UnusedParameters unused;
  bool has_wide_grads;  // some may be in that dtype already, as those of earlier backwards are; the same on all ranks
};

/// The dtype of a group's reduction; throws where its parameters compute in several.
at::ScalarType reduce_dtype(const FsdpParams& params, const MixedPrecisionPolicy& policy);
/// Takes the parameters' unsharded gradients. No buffers: there is nothing to reduce.
Reduction pack_grads(const ReduceGroup& group, const CommStreams& streams);
/// Starts the reduce-scatters, on reduction.stream.
void reduce_scatter(Reduction& reduction, const ReduceGroup& group, const CommStreams& streams);

/// Which ranks had the gradients of a reduction, as pack_grads wrote it and the ranks summed it.
struct GradFlags {
  int64_t first = 0;          // entry.flags of the first entry
  int64_t each = 0;           // values for an entry
  std::vector<float> values;  // none where every gradient was this rank's too

  bool had(const Reduction::Entry& entry, int64_t rank) const { return values.at(entry.flags - first + rank) != 0; }
  bool somebody_had(const Reduction::Entry& entry) const;
};
/// Costs a device a copy that the host waits for, if this rank missed a gradient or `always`.
GradFlags read_flags(const Reduction& reduction, bool always);
/// An error message if a parameter had a gradient on some ranks only; the same on every rank.
std::string describe_unused(const Reduction& reduction, const GradFlags& flags);

}  // namespace megashard
