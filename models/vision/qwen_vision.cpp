#include "models/vision/qwen_vision.h"

#include <utility>

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

}  // namespace

EncoderSpecPtr qwen_vision(VisionLanguageConfig config) {
  auto build = [vision = config.vision] { return std::make_shared<QwenTower>(vision); };
  return picture_encoder(std::move(config), visual_blocks(std::move(build)));
}

PictureTowerSpec visual_blocks(std::function<std::shared_ptr<PictureTower>()> build) {
  return {.name = "visual",
          .layers = "blocks.{*}",
          .qkv = "attn.qkv",
          .casts_inputs = false,  // tables of the rotation, which is computed in fp32
          .build = std::move(build)};
}

}  // namespace megashard
