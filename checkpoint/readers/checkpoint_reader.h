#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/files/run_in_threads.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// A box of a tensor, or a plain value, and its location.
struct StoredChunk {
  std::vector<int64_t> offsets{};  ///< empty for plain values
  std::vector<int64_t> sizes{};
  std::string file{};  ///< inside the checkpoint
  FileRange range{};   ///< including the item's own framing, if any
};

/// A leaf of a checkpoint's plain values.
struct ValueKey {
  std::string key{};
  std::vector<Value> path{};  ///< strings and list indices: position in the nested values
};

/// A checkpoint of any format, opened for reading by one process without communication (open_checkpoint). Opening
/// reads names and sizes, but no tensors. Implementations: DcpReader (torch_dcp, and torch_dist with torch_dcp's keys),
/// TorchFile, and the one of open_hf_weights. All throw for unknown keys.
class CheckpointReader {
 public:
  virtual ~CheckpointReader() = default;
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  virtual std::string format() const = 0;  ///< "torch_dcp", "torch_dist", "safetensors", "torch.save"
  const std::string& path() const { return path_; }
  /// In the best order for reading.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(const std::string& key) const;  ///< null if there is no such tensor
  const std::vector<ValueKey>& value_keys() const { return value_keys_; }
  /// True for keys of tensors and plain values.
  bool contains(const std::string& key) const { return index_.count(key) != 0 || is_value(key); }
  /// True if the key is a plain value or a part of one: torch_dcp stores tensors in lists of dicts apart from the rest
  /// of the list, so such keys are among tensors() too.
  bool is_value(const std::string& key) const { return values_.count(key) != 0; }

  /// Locations of a tensor or a plain value; empty for items stored inside others.
  virtual std::vector<StoredChunk> chunks(const std::string& key) const = 0;
  virtual std::vector<std::string> file_names() const = 0;  ///< inside path(), or the name of path() itself
  /// Keys of tensors that are stored once under another key.
  virtual TiedKeys tied_keys() const { return {}; }

  /// Reads the whole tensor to the CPU; a view of the mapped file if the format allows it.
  at::Tensor read_tensor(const std::string& key);
  /// Reads rows [begin, begin + count) of dimension 0 to the CPU and no others; the whole tensor if it has no
  /// dimensions.
  virtual at::Tensor read_rows(const std::string& key, int64_t begin, int64_t count) = 0;
  /// Copies the saved elements that overlap `into.local` into it and converts the dtype. Data that needs no conversion
  /// is queued in `reads`; call reads.run() while this reader exists.
  virtual void read_into(const std::string& key, const ShardedTensor& into, ReadQueue& reads);
  /// Throws if read_into could not fill the tensor. Reads plain values, but no tensors.
  virtual void check_fit(const std::string& key, const ShardedTensor& into);
  /// Releases the memory of the tensor's pages; views read the file again.
  virtual void release(const std::string& /*key*/) {}

  /// Reads a plain value; a tensor in a value is a record (value_tensors.h).
  virtual Value read_value(const std::string& key);
  /// Reads the plain values, nested. `wanted` selects by key; null: all.
  Dict read_values(const std::function<bool(const std::string& key)>& wanted = {});

  /// Reads every byte and checks it against checksums, sizes and ranges of the format, and that chunks tile their
  /// tensors. Continues after a fault.
  virtual CheckedBytes verify(const FaultSink& fault) = 0;

 protected:
  explicit CheckpointReader(std::string path) : path_(std::move(path)) {}
  void add_tensor(TensorInfo info);                           ///< of duplicate keys the first is used
  void add_value(ValueKey key, Value known = {});             ///< `known`: result of read_value, unless overridden
  const TensorInfo& tensor_at(const std::string& key) const;  ///< throws if there is none

 private:
  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::vector<ValueKey> value_keys_;
  std::unordered_map<std::string, size_t> index_;  // of tensors
  std::unordered_map<std::string, Value> values_;
};

}  // namespace megashard
