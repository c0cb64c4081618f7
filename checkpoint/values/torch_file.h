#pragma once

#include <string>
#include <vector>

#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_paths.h"

namespace megashard {

/// A tensor in a torch.save file, under the path to it joined by dots ("model.layer.weight").
struct TorchFileTensor {
  std::string key;
  StoredTensor stored;
};

/// A file of torch.save, as torch.load would see it but as plain data. Opening reads its pickle,
/// and no tensor.
class TorchFile {
 public:
  explicit TorchFile(const std::string& path);

  const TorchArchive& archive() const { return archive_; }
  /// Dicts are entered always, lists and tuples when they hold tensors or dicts.
  const std::vector<TorchFileTensor>& tensors() const { return tensors_; }
  const std::vector<FlatValue>& values() const { return values_; }
  at::Tensor rows(const TorchFileTensor& tensor, int64_t begin, int64_t count) const;

 private:
  void collect(std::vector<Value>& path, const Value& value);

  InputFile file_;
  TorchArchive archive_;
  std::vector<TorchFileTensor> tensors_;
  std::vector<FlatValue> values_;
};

}  // namespace megashard
