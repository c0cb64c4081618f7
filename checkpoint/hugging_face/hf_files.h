#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {

/// How a model is saved in Hugging Face's format.
struct HfSaveOptions {
  int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;  ///< of data in a file
  std::optional<at::ScalarType> dtype{};  ///< of floating weights; unset: as they are (save_hf_sharded's)
  std::string stem = "model";             ///< of the weights' file names; PEFT's adapters have another
  /// Writes what lies beside the weights (config.json, tokenizer, ...) into the folder given,
  /// synced: these files get their places together with the weights. Null: nothing.
  std::function<void(const std::string& folder)> beside{};
};

/// The files that a model's weights go to: STEM.safetensors, or STEM-0000i-of-0000n.safetensors in
/// the order of the weights when max_shard_bytes are exceeded (a larger tensor has a file of its
/// own).
struct HfFilePlan {
  struct File {
    std::string name;
    std::vector<TensorInfo> tensors;
  };
  std::vector<File> files;
};

HfFilePlan plan_hf_files(const std::vector<TensorInfo>& tensors, const HfSaveOptions& options);

/// A model's folder being written, maybe over an earlier save. New files go into a hidden folder
/// (DIRECTORY/.STEM.tmp) and get their places when all of them are on the disk: the earlier
/// weights are removed, beginning with the file that readers open first (the index, or the only
/// file), the new ones are renamed, and that file comes last. After a failure, a kill or a power
/// cut at any point the folder holds the earlier model, or the new one, or cannot be opened until
/// it is saved again; never some of each. To be used by one process; others write to path().
class HfFolderWriter {
 public:
  HfFolderWriter(std::string directory, HfFilePlan plan, HfSaveOptions options);

  const HfFilePlan& plan() const { return plan_; }
  /// Where a file of the plan is written.
  std::string path(const std::string& name) const { return folder_.hidden() + "/" + name; }
  /// Makes the folders, after removing what a save that was cut short has left.
  void begin() { folder_.begin(); }
  /// With all files of the plan written and synced.
  void publish();
  /// After a failure: frees the disk, unless the earlier weights are gone already: then what was
  /// written stays in the hidden folder until the next save. Does not throw.
  void abandon() noexcept {
    if (!has_removed_) folder_.abandon();
  }

 private:
  std::string index_name() const;
  void write_index() const;
  void remove_earlier_weights();

  std::string directory_;
  HfFilePlan plan_;
  HfSaveOptions options_;
  AtomicFolder folder_;
  bool has_removed_ = false;  // the earlier weights
};

/// Whether a save into this folder has not come to its end.
bool hf_save_was_cut_short(const std::string& directory);

}  // namespace megashard
