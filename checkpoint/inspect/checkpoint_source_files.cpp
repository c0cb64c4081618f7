// Formats of single files: Hugging Face's safetensors, and torch.save.
#include <c10/util/Exception.h>

#include <filesystem>

#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/inspect/checkpoint_source.h"
#include "checkpoint/values/torch_file.h"

namespace megashard {
namespace {

class SafetensorsSource : public CheckpointSource {
 public:
  explicit SafetensorsSource(const std::string& path) : CheckpointSource(path) {
    if (is_directory(path)) {
      weights_ = std::make_unique<HfWeights>(this->path());
      for (int i = 0; i < weights_->file_count(); ++i) {
        const auto& file = weights_->file(i);
        add(file, std::filesystem::path(file.path()).filename().string());
      }
    } else {
      single_ = std::make_unique<SafetensorsFile>(this->path());
      add(*single_, "");
    }
  }

  std::string format() const override { return "safetensors"; }
  Value value(size_t index) override { return values_[index]; }

  at::Tensor rows(size_t index, int64_t begin, int64_t count) override {
    const auto& name = tensors_[index].info.name;
    const auto whole = files_of_[index]->tensor(name);
    return whole.dim() == 0 ? whole : whole.narrow(0, begin, count);
  }

  /// The format has no checksums: opening has compared every range with the file's length, so that
  /// reading is what is left.
  CheckedBytes verify(const FaultSink& fault) override {
    CheckedBytes checked;
    std::vector<char> buffer(8 << 20);
    for (const auto& [name, bytes] : files()) {
      const auto path = weights_ == nullptr ? this->path() : this->path() + "/" + name;
      try {
        const InputFile file(path);
        for (int64_t at = 0; at < file.size(); at += static_cast<int64_t>(buffer.size())) {
          file.read_at(buffer.data(), std::min(static_cast<int64_t>(buffer.size()), file.size() - at), at);
        }
        checked.bytes += file.size();
      } catch (const c10::Error& error) {
        fault(error.what_without_backtrace());
      }
    }
    checked.without_checksum = checked.bytes;
    return checked;
  }

 private:
  void add(const SafetensorsFile& file, const std::string& name) {
    add_file(name);
    for (const auto& info : file.tensors()) {
      const FileRange range{file.data_offset(info.name), tensor_bytes(info)};
      tensors_.push_back(
          {info, {{std::vector<int64_t>(info.sizes.size(), 0), info.sizes, files().back().first, range}}});
      files_of_.push_back(&file);
    }
    for (const auto& [key, value] : file.metadata()) {
      value_keys_.push_back((name.empty() ? "" : name + ":") + "__metadata__." + key);
      values_.emplace_back(value);
    }
  }

  std::unique_ptr<HfWeights> weights_;
  std::unique_ptr<SafetensorsFile> single_;
  std::vector<const SafetensorsFile*> files_of_;  // by tensor
  std::vector<Value> values_;
};

class TorchFileSource : public CheckpointSource {
 public:
  explicit TorchFileSource(const std::string& path) : CheckpointSource(path), file_(this->path()) {
    add_file("");
    for (const auto& tensor : file_.tensors()) {
      const auto& stored = tensor.stored;
      const TensorInfo info{tensor.key, stored.dtype, stored.sizes};
      tensors_.push_back({info,
                          {{std::vector<int64_t>(stored.sizes.size(), 0),
                            stored.sizes,
                            files().back().first,
                            {stored.data_offset, tensor_bytes(info)}}}});
    }
    for (const auto& value : file_.values()) value_keys_.push_back(value.key);
  }

  std::string format() const override { return "torch.save"; }
  Value value(size_t index) override { return file_.values()[index].value; }
  at::Tensor rows(size_t index, int64_t begin, int64_t count) override {
    return file_.rows(file_.tensors()[index], begin, count);
  }
  CheckedBytes verify(const FaultSink& fault) override {
    return verify_archive(file_.archive(), files().back().first, fault);
  }

 private:
  TorchFile file_;
};

}  // namespace

std::unique_ptr<CheckpointSource> open_safetensors_source(const std::string& path) {
  return std::make_unique<SafetensorsSource>(path);
}

std::unique_ptr<CheckpointSource> open_torch_file_source(const std::string& path) {
  return std::make_unique<TorchFileSource>(path);
}

}  // namespace megashard
