#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Where a group's communication buffers come from (Comm of FSDP2's custom communication).
class Comm {
 public:
  virtual ~Comm() = default;
  /// Contiguous, of exactly that size; something else is refused: copies into it go by address.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) = 0;
};

/// How a group's packed buffers are gathered. Everything that the group unshards travels through it, in one buffer.
class AllGather : public Comm {
 public:
  /// As ProcessGroup::all_gather_into, on the current stream.
  virtual Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) = 0;
};

/// The same for reductions.
class ReduceScatter : public Comm {
 public:
  virtual Work run(at::Tensor output, at::Tensor input, ReduceOp op, ProcessGroup& group) = 0;
};

/// Ours: what an extension knows of its parameter and of the ranks that gather it. Leading dimensions that are cut as
/// one are one in all sizes and tensors here.
struct GatherShape {
  std::vector<int64_t> whole_sizes;  ///< of the unsharded parameter
  std::vector<int64_t> chunk_sizes;  ///< of the first rank's sharded parameter: the padded local sizes
  int64_t shard_dim = 0;
  int ranks = 1;
  int rank = 0;
  at::ScalarType stored_dtype = at::kFloat;   ///< of the sharded parameter
  at::ScalarType compute_dtype = at::kFloat;  ///< of the unsharded parameter
};

/// Ours: chooses what a parameter sends in its group's all-gather instead of its rows in the compute dtype, and how the
/// whole is rebuilt (fsdp_pre_all_gather and fsdp_post_all_gather of PyTorch's tensor subclasses). Payloads of any
/// dtype travel in the group's one packed buffer, beside plain parameters. See set_all_gather_extension.
class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  struct Payload {
    at::ScalarType dtype;
    int64_t numel;
  };
  /// What one rank sends: the same list on every rank, whatever rows it has. Asked once.
  virtual std::vector<Payload> payloads(const GatherShape& shape) = 0;

  /// Fills this rank's payloads, 1-D views of the packed buffer, from its local rows, which may be fewer than
  /// chunk_sizes says, or none. Runs on the copy-in stream, without autograd; must not wait for the device.
  virtual void pack(const GatherShape& shape, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) = 0;

  /// Writes `whole` (whole_sizes, compute_dtype, contiguous) from payloads[i] of sizes [ranks, numel], strided views of
  /// the gathered buffer that are valid during the call. Runs on the compute stream.
  virtual void unpack(const GatherShape& shape, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) = 0;
};

}  // namespace megashard
