#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/files/read_queue.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"
#include "checkpoint/values/verify_archive.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// A box of a tensor, or a plain value, and where it is stored.
struct StoredChunk {
  std::vector<int64_t> offsets{};  ///< none of a plain value
  std::vector<int64_t> sizes{};
  std::string file{};  ///< inside the checkpoint
  FileRange range{};   ///< with the item's own frame, where it has one
};

/// A leaf of a checkpoint's plain values.
struct ValueKey {
  std::string key{};
  std::vector<Value> path{};  ///< strings and list indices: its place in the nested values
};

/// A checkpoint of any format, open for reading by one process, without communication
/// (open_checkpoint.h). Opening reads names and sizes, and no tensor. Each format has its own reader:
/// DcpReader (torch_dcp, and torch_dist by torch_dcp's keys), TorchFile, and the one behind
/// open_hf_weights. All throw for keys that are not there.
class CheckpointReader {
 public:
  virtual ~CheckpointReader() = default;
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  virtual std::string format() const = 0;  ///< "torch_dcp", "torch_dist", "safetensors", "torch.save"
  const std::string& path() const { return path_; }
  /// In the order in which they are read best.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(const std::string& key) const;  ///< null: there is no such tensor
  const std::vector<ValueKey>& value_keys() const { return value_keys_; }
  /// Of a tensor or a plain value.
  bool contains(const std::string& key) const { return index_.count(key) != 0 || is_value(key); }
  /// Whether a key is a plain value's, or a part of one: torch_dcp keeps the tensors in lists of dicts
  /// apart from what is around them, so these are among tensors() too.
  bool is_value(const std::string& key) const { return values_.count(key) != 0; }

  /// Where a tensor or a plain value lies; nothing of what is stored within something else.
  virtual std::vector<StoredChunk> chunks(const std::string& key) const = 0;
  virtual std::vector<std::string> file_names() const = 0;  ///< inside path(), or path()'s own
  /// Tensors whose bytes are stored once, under another key.
  virtual TiedKeys tied_keys() const { return {}; }

  /// The whole tensor, on the CPU; a view of the mapped file where the format allows it.
  at::Tensor read_tensor(const std::string& key);
  /// Rows [begin, begin + count) of dimension 0, on the CPU, reading no others; the whole tensor when
  /// it has no dimensions.
  virtual at::Tensor read_rows(const std::string& key, int64_t begin, int64_t count) = 0;
  /// Copies the saved elements that overlap with `into.local` into it, converting the dtype. What can
  /// go straight to its place is read by reads.run(), while this reader lives.
  virtual void read_into(const std::string& key, const ShardedTensor& into, ReadQueue& reads);
  /// Throws when read_into could not fill the tensor. Reads plain values, and no tensor.
  virtual void check_fit(const std::string& key, const ShardedTensor& into);
  /// Gives back the memory that reading the tensor took; a view of it reads the file again.
  virtual void release(const std::string& /*key*/) {}

  /// Of a tensor in a value, its record (value_tensors.h).
  virtual Value read_value(const std::string& key);
  /// The plain values, nested. `wanted` chooses by key; null: all.
  Dict read_values(const std::function<bool(const std::string& key)>& wanted = {});

  /// Reads every byte and compares it with what the format knows of it: checksums, sizes, ranges,
  /// whether a tensor's chunks tile it. Goes on after a fault.
  virtual CheckedBytes verify(const FaultSink& fault) = 0;

 protected:
  explicit CheckpointReader(std::string path) : path_(std::move(path)) {}
  void add_tensor(TensorInfo info);                           ///< of equal keys the first counts
  void add_value(ValueKey key, Value known = {});             ///< what read_value gives, unless a format overrides it
  const TensorInfo& tensor_at(const std::string& key) const;  ///< throws when there is none

 private:
  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::vector<ValueKey> value_keys_;
  std::unordered_map<std::string, size_t> index_;  // of tensors
  std::unordered_map<std::string, Value> values_;
};

}  // namespace megashard
