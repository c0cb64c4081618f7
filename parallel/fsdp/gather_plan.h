#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "parallel/fsdp/all_gather_extension.h"
#include "parallel/fsdp/comm_streams.h"
#include "parallel/fsdp/fsdp_param.h"
#include "parallel/fsdp/group_collectives.h"
#include "parallel/fsdp/shard_copies.h"

namespace megashard {

/// One way to gather a group's parameters: what each rank sends of each, where it lies in the one
/// buffer that travels, and where it goes from there. Made once, run every step.
class GatherPlan {
 public:
  using Params = std::vector<std::unique_ptr<FsdpParam>>;
  struct Options {
    std::shared_ptr<AllGather> custom{};  ///< all parameters travel in its buffer
    std::optional<GroupMemory> memory{};  ///< all travel in a buffer of the group's own memory
    bool on_current_stream = false;       ///< pack where the caller computes
  };

  GatherPlan() = default;
  /// Every rank sends its rows, or what its parameter's extension makes of them.
  static GatherPlan of_rows(ProcessGroupPtr group, const Params& params, Options options);
  /// Every rank sends the slice of the gathered parameters that keep_slices left with it.
  static GatherPlan of_slices(ProcessGroupPtr group, const Params& params, Options options);

  const ProcessGroupPtr& group() const { return group_; }  ///< null: not made yet
  void start(const CommStreams& streams);
  /// The parameters' full storages are filled, on the current stream.
  void finish(const CommStreams& streams);
  /// The buffer that finish may still be reading on the device; undefined on CPUs.
  at::Tensor take_packed() { return std::move(packed_); }

  void keep_slices();  ///< of the full storages, which stay
  void drop_slices();

 private:
  struct Payload {
    AllGatherExtension::Payload what;
    int64_t offset;  // in bytes, from the piece's
  };
  /// A parameter's place: each rank sends `bytes` bytes.
  struct Piece {
    FsdpParam* param;
    int64_t bytes;
    int64_t offset = kDirect;         // in each rank's part of the packed buffer
    at::Tensor own_part{};            // kDirect: this rank's bytes of the full storage
    at::Tensor slice{};               // of_slices: uint8 [bytes], while kept
    std::vector<Payload> payloads{};  // of an extension
    GatherShape shape{};
  };
  static constexpr int64_t kDirect = -1;
  /// On a CPU, parameters whose parts are at least this large travel without the packed buffer: two
  /// copies less. Below, the latency of one more collective costs more than the copies.
  static constexpr int64_t kDirectBytes = 256 * 1024;

  GatherPlan(ProcessGroupPtr group, bool from_rows, Options options);
  void place(Piece piece, bool contiguous);
  void add_extension(Piece& piece) const;
  at::Tensor new_buffer(c10::Device device) const;
  at::Tensor payload_view(const Piece& piece, size_t index, bool of_all_ranks) const;
  int rank() const { return group_->rank(); }
  int ranks() const { return group_->size(); }

  void copy_in(const Piece& piece);
  void copy_out(const Piece& piece);
  void run_copies(const CommStreams& streams);
  void drop_copies();  // left by a call that threw

  ProcessGroupPtr group_;
  bool from_rows_ = true;
  Options options_;
  std::vector<Piece> pieces_;
  int64_t packed_bytes_ = 0;         // per rank
  at::Tensor packed_;                // uint8 [ranks * packed_bytes], while a gather runs
  std::vector<RowsCopy> copies_;     // collected, to run in one launch
  std::vector<at::Tensor> sources_;  // of copies_
  std::vector<Work> works_;
  StreamEvent gathered_;
};

}  // namespace megashard
