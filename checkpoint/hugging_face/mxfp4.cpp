#include "checkpoint/hugging_face/mxfp4.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace megashard {
namespace {

constexpr int64_t kBlock = 32;  // values with one exponent
constexpr int kBias = 127;
constexpr const char* kBlocks = "_blocks";
constexpr const char* kScales = "_scales";

/// FP4 (E2M1): a sign, two bits of exponent and one of mantissa.
constexpr float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0F, -0.5, -1, -1.5, -2, -3, -4, -6};

/// bf16 [..., B * 32] of blocks [..., B, 16] and scales [..., B]; a byte has its first value in the lower bits.
at::Tensor dequantised(const at::Tensor& blocks, const at::Tensor& scales) {
  const auto packed = blocks.contiguous(), exponents = scales.contiguous();
  auto values = at::empty({packed.numel() * 2}, at::kBFloat16);
  const auto* from = packed.const_data_ptr<uint8_t>();
  const auto* exponent = exponents.const_data_ptr<uint8_t>();
  auto* into = values.mutable_data_ptr<at::BFloat16>();
  for (int64_t block = 0; block < exponents.numel(); ++block) {
    const float scale = std::ldexp(1.0F, exponent[block] - kBias);
    for (int64_t i = 0; i < kBlock / 2; ++i) {
      const uint8_t both = *from++;
      *into++ = kValues[both & 15] * scale;
      *into++ = kValues[both >> 4] * scale;
    }
  }
  auto sizes = exponents.sizes().vec();
  sizes.back() *= kBlock;
  return values.view(sizes);
}

class Mxfp4Reader : public CheckpointReader {
 public:
  explicit Mxfp4Reader(std::unique_ptr<CheckpointReader> files)
      : CheckpointReader(files->path()), files_(std::move(files)) {
    for (const auto& info : files_->tensors()) {
      if (const auto name = quantised(info); !name.empty()) {
        add_tensor({name, at::kBFloat16, {info.sizes[0], info.sizes[2] * kBlock, info.sizes[1]}});
      } else if (!is_scale(info.name)) {
        add_tensor(info);
      }
    }
    for (const auto& value : files_->value_keys()) add_value(value, files_->read_value(value.key));
  }

  bool has_any() const { return tensors().size() < files_->tensors().size(); }
  std::unique_ptr<CheckpointReader> files() && { return std::move(files_); }

  std::string format() const override { return files_->format(); }
  std::vector<StoredChunk> chunks(const std::string& key) const override {
    if (!is_quantised(key)) return files_->chunks(key);
    auto chunks = files_->chunks(key + kBlocks);
    for (auto& chunk : chunks) {
      chunk.sizes = tensor_at(key).sizes;
      chunk.offsets.assign(chunk.sizes.size(), 0);
    }
    return chunks;
  }
  std::vector<std::string> file_names() const override { return files_->file_names(); }
  at::Tensor read_rows(const std::string& key, int64_t begin, int64_t count) override {
    if (!is_quantised(key)) return files_->read_rows(key, begin, count);
    const auto blocks = files_->read_rows(key + kBlocks, begin, count);
    return dequantised(blocks, files_->read_rows(key + kScales, begin, count)).transpose(1, 2);
  }
  void release(const std::string& key) override {
    if (!is_quantised(key)) return files_->release(key);
    files_->release(key + kBlocks);
    files_->release(key + kScales);
  }
  CheckedBytes verify(const FaultSink& fault) override { return files_->verify(fault); }

 private:
  bool is_quantised(const std::string& key) const { return files_->find(key) == nullptr; }
  /// The weight whose blocks these are; empty if they are none.
  std::string quantised(const TensorInfo& info) const {
    if (!info.name.ends_with(kBlocks) || info.dtype != at::kByte || info.sizes.size() != 4 || info.sizes[3] != 16)
      return "";
    const auto name = info.name.substr(0, info.name.size() - std::string(kBlocks).size());
    const auto* scales = files_->find(name + kScales);
    const std::vector<int64_t> wanted(info.sizes.begin(), info.sizes.end() - 1);
    return scales != nullptr && scales->dtype == at::kByte && scales->sizes == wanted ? name : "";
  }
  bool is_scale(const std::string& key) const {
    if (!key.ends_with(kScales)) return false;
    const auto* blocks = files_->find(key.substr(0, key.size() - std::string(kScales).size()) + kBlocks);
    return blocks != nullptr && !quantised(*blocks).empty();
  }

  std::unique_ptr<CheckpointReader> files_;
};

}  // namespace

std::unique_ptr<CheckpointReader> dequantise_mxfp4(std::unique_ptr<CheckpointReader> files) {
  auto reader = std::make_unique<Mxfp4Reader>(std::move(files));
  if (!reader->has_any()) return std::move(*reader).files();
  return reader;
}

}  // namespace megashard
