#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/hugging_face/safetensors.h"

namespace megashard {

/// The weights of a Hugging Face model directory: model.safetensors, or the files that
/// model.safetensors.index.json names. Opening maps the files and reads their headers only.
class HfWeights {
 public:
  /// Throws a sentence when the directory has no weights (or a save into it was cut short while it
  /// replaced them), an index that is not one, or a file it names is missing.
  explicit HfWeights(const std::string& directory);

  const std::vector<TensorInfo>& tensors() const { return tensors_; }  ///< file by file
  bool contains(const std::string& name) const { return file_of_.count(name) != 0; }
  const TensorInfo& info(const std::string& name) const;
  at::Tensor tensor(const std::string& name) const;  ///< as SafetensorsFile::tensor
  void forget(const std::string& name) const;        ///< as SafetensorsFile::forget

  int file_count() const { return static_cast<int>(files_.size()); }
  const SafetensorsFile& file(int index) const { return *files_[index]; }
  int file_of(const std::string& name) const;  ///< throws when there is no such tensor

 private:
  void add_file(const std::string& path);
  void read_index(const std::string& directory, const std::string& index_path);

  std::string directory_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, int> file_of_;
};

/// The weight_map of a model.safetensors.index.json's content: the file of each tensor. `where`,
/// its path, begins the sentences that are thrown for what is none or names a file of another
/// folder.
std::map<std::string, std::string> parse_weight_map(std::string_view text, const std::string& where);

/// Writes the files of plan_hf_files, their index where there are several, and what
/// `options.beside` writes. `data` is asked for one tensor at a time, so memory stays at the
/// largest. The directory is created; weights of an earlier save there are replaced, and never
/// mixed with the new ones (HfFolderWriter says what a failure leaves).
void save_hf_weights(const std::string& directory, const std::vector<TensorInfo>& tensors,
                     const std::function<at::Tensor(const TensorInfo&)>& data, const HfSaveOptions& options = {});

}  // namespace megashard
