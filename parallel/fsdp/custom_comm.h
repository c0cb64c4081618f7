#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Allocates a group's communication buffers (Comm of FSDP2's custom communication).
class Comm {
 public:
  virtual ~Comm() = default;
  /// Returns a contiguous tensor of exactly `numel` elements; others are refused, because copies into it use its
  /// address.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) = 0;
};

/// Custom all-gather of a group. All its parameters travel through it in one packed buffer.
class AllGather : public Comm {
 public:
  /// Same contract as ProcessGroup::all_gather_into; runs on the current stream.
  virtual Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) = 0;
};

/// Custom reduce-scatter of a group; runs on the current stream.
class ReduceScatter : public Comm {
 public:
  virtual Work run(at::Tensor output, at::Tensor input, ReduceOp op, ProcessGroup& group) = 0;
};

/// Shapes that an extension gets for its parameter. If several leading dimensions are sharded as one, they are merged
/// into one in all sizes and tensors here. Ours.
struct GatherShape {
  std::vector<int64_t> whole_sizes;  ///< sizes of the unsharded parameter
  std::vector<int64_t> chunk_sizes;  ///< padded local sizes (those of the first rank's shard)
  int64_t shard_dim = 0;
  int ranks = 1;
  int rank = 0;
  at::ScalarType stored_dtype = at::kFloat;   ///< dtype of the sharded parameter
  at::ScalarType compute_dtype = at::kFloat;  ///< dtype of the unsharded parameter
};

/// Defines what a parameter sends in its group's all-gather instead of its rows in the compute dtype, and how it is
/// unsharded from that (fsdp_pre_all_gather and fsdp_post_all_gather of PyTorch's tensor subclasses). Payloads of any
/// dtype share the group's packed buffer with plain parameters. See set_all_gather_extension. Ours.
class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  struct Payload {
    at::ScalarType dtype;
    int64_t numel;
  };
  /// Tensors that one rank sends; the same on every rank, however many rows it has. Called once.
  virtual std::vector<Payload> payloads(const GatherShape& shape) = 0;

  /// Fills this rank's payloads, 1-D views of the packed buffer, from its local rows (fewer than in chunk_sizes on some
  /// ranks, possibly none). Runs on the copy-in stream without autograd; must not block the host on the device.
  virtual void pack(const GatherShape& shape, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) = 0;

  /// Writes `whole` (whole_sizes, compute_dtype, contiguous) from payloads[i] [ranks, numel], which are strided views
  /// of the gathered buffer, valid during the call only. Runs on the compute stream.
  virtual void unpack(const GatherShape& shape, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) = 0;
};

}  // namespace megashard
