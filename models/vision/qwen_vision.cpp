#include "models/vision/qwen_vision.h"

#include <utility>

#include "models/vision/picture_encoder.h"
#include "models/vision/vision_tower.h"

namespace megashard {
namespace {

class QwenTower final : public PictureTower {
 public:
  explicit QwenTower(const VisionConfig& config) : visual_(std::make_shared<Hooked<VisionTower>>(config)) {}

  EncoderModules modules() override { return {{"visual", visual_}}; }
  VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) override {
    return visual_->forward(patches, plan);
  }

 private:
  std::shared_ptr<Hooked<VisionTower>> visual_;
};

class QwenVisionSpec final : public EncoderSpec {
 public:
  explicit QwenVisionSpec(VisionLanguageConfig config) : config_(std::move(config)) {}

  std::shared_ptr<Encoder> build() const override {
    return std::make_shared<PictureEncoder>(config_, std::make_shared<QwenTower>(config_.vision));
  }
  std::string owner_class() const override { return config_.model_name; }
  /// The tower computes its rotation in fp32: tables must not be cast on the way into its blocks.
  std::vector<EncoderTower> towers() const override {
    return {{"visual", "image_encoder", "blocks.{*}", /*casts_inputs=*/false}};
  }
  /// q, k and v, concatenated.
  std::vector<int64_t> qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const override {
    return name.ends_with(".attn.qkv.weight") ? std::vector<int64_t>(3, sizes[0] / 3) : std::vector<int64_t>();
  }

 private:
  VisionLanguageConfig config_;
};

}  // namespace

EncoderSpecPtr qwen_vision(VisionLanguageConfig config) { return std::make_shared<QwenVisionSpec>(std::move(config)); }

}  // namespace megashard
