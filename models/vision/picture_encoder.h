#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/config/vision_config.h"
#include "models/network/encoder.h"
#include "models/vision/vision_plan.h"

namespace megashard {

/// Result of its prepare(): the pictures of a batch and their tokens. With a sequence on several ranks: those that
/// reach into this rank's rows.
struct PicturePlan : InputPlan {
  VisionPlan vision{};         ///< plans all images, then all videos
  at::Tensor token_indices{};  ///< of features in this rank's tokens, as PicturePlaces; on the CPU
  /// [features] int64, on the CPU: which of the tower's features these are, if other ranks have tokens of some.
  /// Undefined: the first ones.
  at::Tensor own_features{};
  /// No pictures, but other ranks may have some: the tower runs on one empty unit whose features are left out, so that
  /// its collectives happen and its gradients are zeros.
  bool dummy_image = false;
  at::Tensor key_ends{};  ///< [B, T] int64, on the CPU: KeySpan::key_ends
};

struct VisionFeatures {
  at::Tensor features;                // [features, out]
  std::vector<at::Tensor> deepstack;  // each [features, out]

  template <class F>
  void visit_tensors(F&& f) {
    f(features);
    f(deepstack);
  }
};

/// The modules that map the patches of all images and frames of a batch to features, in order.
class PictureTower {
 public:
  virtual ~PictureTower() = default;
  virtual EncoderModules modules() = 0;
  /// patches [P, C * T * S * S], P as in the plan.
  virtual VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) = 0;
};

/// The encoder of pictures. Its columns of items are pixel_values and pixel_values_videos [patches, C * T * S * S],
/// image_grid_thw and video_grid_thw [pictures, 3] int64, and second_per_grid_ts [videos], as Qwen's processors make
/// them, in the order of the batch; any may be absent. Position ids follow from them and the tokens for models with
/// M-RoPE, unless they are given.
class PictureEncoder final : public Encoder {
 public:
  PictureEncoder(VisionLanguageConfig config, std::shared_ptr<PictureTower> tower);

  EncoderModules modules() override { return tower_->modules(); }
  void prepare(Batch& input) const override;
  InjectedEmbeddings encode(const Batch& input) override;

 private:
  VisionLanguageConfig config_;
  std::shared_ptr<PictureTower> tower_;
};

/// A PictureTower and its modules.
struct PictureTowerSpec {
  std::string name = "vision_tower";  ///< its module with the layers
  std::string layers{};               ///< pattern of these in that module
  std::string qkv{};                  ///< layer in them with the rows of queries, keys and values; empty: none
  bool casts_inputs = true;           ///< EncoderTower::casts_inputs
  std::function<std::shared_ptr<PictureTower>()> build{};
  /// Describes forms of its weights in files, by the path of that module with its dot. Null: files have the model's.
  std::function<std::vector<WeightGroup>(const std::string& path)> forms{};
};

EncoderSpecPtr picture_encoder(VisionLanguageConfig config, PictureTowerSpec tower);

}  // namespace megashard
