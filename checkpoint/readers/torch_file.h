#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/readers/checkpoint_reader.h"
#include "checkpoint/values/torch_archive.h"

namespace megashard {

/// A torch.save file read as plain data. A tensor's key is its path joined by dots ("model.layer.weight"): dicts are
/// always entered, lists and tuples if they contain tensors or dicts. Opening reads the pickle, but no tensors.
class TorchFile : public CheckpointReader {
 public:
  explicit TorchFile(const std::string& path);

  const TorchArchive& archive() const { return archive_; }

  std::string format() const override { return "torch.save"; }
  std::vector<StoredChunk> chunks(const std::string& key) const override;
  std::vector<std::string> file_names() const override;
  at::Tensor read_rows(const std::string& key, int64_t begin, int64_t count) override;
  CheckedBytes verify(const FaultSink& fault) override;

 private:
  void collect(std::vector<Value>& path, const Value& value);

  InputFile file_;
  TorchArchive archive_;
  std::unordered_map<std::string, StoredTensor> stored_;
};

}  // namespace megashard
