#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {

/// Options for saving a model in Hugging Face's format.
struct HfSaveOptions {
  int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;  ///< size of the data per file
  std::optional<at::ScalarType> dtype{};  ///< dtype of floating-point weights; unset: unchanged (save_hf_sharded only)
  std::unordered_set<std::string> in_fp32{};  ///< names of weights that are saved in fp32, whatever `dtype` says
  std::string stem = "model";                 ///< stem of the weights' file names; PEFT adapters use another
  /// Writes the files beside the weights (config.json, tokenizer, ...) into the given folder, synced. They are
  /// published together with the weights. Null: none.
  std::function<void(const std::string& folder)> beside{};
};

/// Files of a model's weights: STEM.safetensors, or STEM-0000i-of-0000n.safetensors in the order of the weights if
/// max_shard_bytes is exceeded. A larger tensor gets its own file.
struct HfFilePlan {
  struct File {
    std::string name;
    std::vector<TensorInfo> tensors;
  };
  std::vector<File> files;
};

HfFilePlan plan_hf_files(const std::vector<TensorInfo>& tensors, const HfSaveOptions& options);

/// Writes a model's folder, possibly over an earlier save. New files are written to a hidden folder
/// (DIRECTORY/.STEM.tmp). When all are synced, publish() removes the earlier weights, beginning with the file that
/// readers open first (the index, or the only file), and renames the new ones, that file last. After a failure, a kill
/// or a power cut at any point the folder holds the earlier model, or the new one, or is refused by readers until the
/// next save; never a mixture. Used by one process; others write to path().
class HfFolderWriter {
 public:
  HfFolderWriter(std::string directory, HfFilePlan plan, HfSaveOptions options);

  const HfFilePlan& plan() const { return plan_; }
  /// Path at which to write a file of the plan.
  std::string path(const std::string& name) const { return folder_.hidden() + "/" + name; }
  /// Creates the folders after removing leftovers of an interrupted save.
  void begin() { folder_.begin(); }
  /// Publishes the files. Call it after all files of the plan are written and synced.
  void publish();
  /// Cleans up after a failure: removes the written files, unless the earlier weights are already removed; then they
  /// stay in the hidden folder until the next save. Does not throw.
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
  bool has_removed_ = false;  // the earlier weights are removed
};

/// True if a save into this folder was interrupted.
bool hf_save_was_cut_short(const std::string& directory);

/// Files beside the weights in a Hugging Face model directory: config.json, tokenizer, generation settings, ...

/// Copies all assets, synced; for HfSaveOptions::beside; config.json as read_hf_config. Throws an error that names the
/// file.
void copy_hf_assets(const std::string& from, const std::string& to);

/// Reads config.json, without the quantization_config of MXFP4: such weights are read as bf16 (mxfp4.h). nullopt if
/// there is none or `directory` is empty. Throws if it is not a JSON object or has duplicate keys.
std::optional<nlohmann::ordered_json> read_hf_config(const std::string& directory);
/// Reads generation_config.json, the defaults of transformers' generate(). Otherwise as read_hf_config.
std::optional<nlohmann::ordered_json> read_generation_config(const std::string& directory);
/// As read_hf_config. Throws an error that names --hf-model if there is none.
nlohmann::ordered_json need_hf_config(const std::string& directory);
void write_hf_config(const std::string& directory, const nlohmann::ordered_json& config);

}  // namespace megashard
