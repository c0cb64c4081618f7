#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// A box of a tensor, and where it is stored.
struct SourceChunk {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  std::string file;  ///< inside the checkpoint
  FileRange range;   ///< with the item's own frame, where it has one
};

struct SourceTensor {
  TensorInfo info;
  std::vector<SourceChunk> chunks;
};

/// Takes one fault: the file, the item, and what is wrong with it.
using FaultSink = std::function<void(const std::string& fault)>;

/// How much was checked.
struct CheckedBytes {
  int64_t bytes = 0;
  int64_t without_checksum = 0;  ///< of these: read, but nothing says what they should be
};

/// A checkpoint of any format, open for looking at. Opening reads names and sizes, no tensor.
class CheckpointSource {
 public:
  virtual ~CheckpointSource() = default;

  virtual std::string format() const = 0;  ///< "torch_dcp", "safetensors", ...
  const std::string& path() const { return path_; }
  /// The step's, from its folder's name; nothing for release and single files.
  std::optional<int64_t> iteration() const { return iteration_; }
  const std::vector<SourceTensor>& tensors() const { return tensors_; }
  const std::vector<std::string>& value_keys() const { return value_keys_; }
  const std::vector<std::pair<std::string, int64_t>>& files() const { return files_; }  ///< bytes

  virtual Value value(size_t index) = 0;
  /// Rows [begin, begin + count) of dimension 0, on the CPU; the whole tensor when it has no
  /// dimensions.
  virtual at::Tensor rows(size_t index, int64_t begin, int64_t count) = 0;
  /// Reads every byte and compares it with all that is known of it: checksums, sizes, ranges,
  /// whether a tensor's chunks tile it. Goes on after a fault.
  virtual CheckedBytes verify(const FaultSink& fault) = 0;

 protected:
  explicit CheckpointSource(std::string path);
  void add_file(const std::string& name);  ///< inside path(), or path() itself when empty

  std::vector<SourceTensor> tensors_;
  std::vector<std::string> value_keys_;

 private:
  std::string path_;
  std::optional<int64_t> iteration_;
  std::vector<std::pair<std::string, int64_t>> files_;
};

/// A step's folder, a training's directory, a Hugging Face directory, a .safetensors file or a
/// torch.save file. Throws a sentence for anything else. Of a training's directory it is the step
/// that a run would load (find_step.h): `notice` gets a line when that is not the tracker's. A
/// folder and `ckpt_step` are taken as they are, damaged or not.
std::unique_ptr<CheckpointSource> open_checkpoint(const std::string& path,
                                                  std::optional<int64_t> ckpt_step = std::nullopt,
                                                  const std::function<void(const std::string& line)>& notice = {});

// One format each; files checkpoint_source_*.cpp.
std::unique_ptr<CheckpointSource> open_dcp_source(const std::string& folder);
std::unique_ptr<CheckpointSource> open_safetensors_source(const std::string& path);
std::unique_ptr<CheckpointSource> open_torch_file_source(const std::string& path);

/// The archive's entries against their CRC-32. `item` names it in faults.
CheckedBytes verify_archive(const TorchArchive& archive, const std::string& item, const FaultSink& fault);

}  // namespace megashard
