#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parallel/copies/batched_copy.h"
#include "parallel/device/streams.h"
#include "parallel/fsdp/detail/comm_options.h"
#include "parallel/fsdp/detail/fsdp_param.h"

namespace megashard {

struct CommStreams;

/// A plan for unsharding a group's parameters (foreach_all_gather and foreach_all_gather_copy_out): what each rank
/// sends, its offset in the packed buffer, and where it is copied out. Built once, run every step.
class ForeachAllGather {
 public:
  ForeachAllGather() = default;
  /// Every rank sends its sharded parameters, or the payloads of their extensions.
  static ForeachAllGather of_shards(ProcessGroupPtr group, const FsdpParams& params, const CommOptions& options,
                                    bool on_current_stream);
  /// Every rank sends the slices of the unsharded parameters that keep_slices kept.
  static ForeachAllGather of_slices(ProcessGroupPtr group, const FsdpParams& params, const CommOptions& options,
                                    bool on_current_stream);

  const ProcessGroupPtr& group() const { return group_; }  ///< null: not built yet
  void start(const CommStreams& streams);
  /// Fills the parameters' unsharded storages, on the current stream.
  void copy_out(const CommStreams& streams);
  /// Packed buffer that copy_out may still be reading on the device; undefined on a CPU.
  at::Tensor take_packed() { return std::move(packed_); }

  void keep_slices();  ///< copies this rank's slices of the unsharded storages
  void drop_slices();

 private:
  struct Payload {
    AllGatherExtension::Payload what;
    int64_t offset;  // in bytes, relative to the item's
  };
  /// A parameter's part: `bytes` bytes per rank.
  struct Item {
    FsdpParam* param;
    int64_t bytes;
    int64_t offset = kInPlace;        // in each rank's part of the packed buffer
    at::Tensor slice{};               // of_slices: uint8 [bytes], while kept
    std::vector<Payload> payloads{};  // of the extension, if any
    GatherShape shape{};
  };
  static constexpr int64_t kInPlace = -1;  // gathered directly into the unsharded storage

  ForeachAllGather(ProcessGroupPtr group, bool from_shards, const CommOptions& options, bool on_current_stream);
  void place(Item item, bool contiguous);
  void add_extension(Item& item) const;
  at::Tensor payload_view(const Item& item, size_t index, bool of_all_ranks) const;
  at::Tensor own_part(const Item& item) const;
  int rank() const { return group_->rank(); }
  int ranks() const { return group_->size(); }

  void copy_in(const Item& item);
  void copy_out(const Item& item);
  void run_copies(const CommStreams& streams);
  void drop_copies();  // left over by a call that threw

  ProcessGroupPtr group_;
  bool from_shards_ = true;
  std::shared_ptr<AllGather> custom_;
  std::optional<GroupMemory> memory_;
  bool on_current_stream_ = false;  // packs on the caller's compute stream
  std::vector<Item> items_;
  int64_t packed_bytes_ = 0;         // per rank
  at::Tensor packed_;                // uint8 [ranks * packed_bytes], during a gather
  std::vector<RowsCopy> copies_;     // collected to run in one launch
  std::vector<at::Tensor> sources_;  // keeps the tensors of copies_ alive
  std::vector<Work> works_;
  StreamEvent gathered_;
};

}  // namespace megashard
