#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/config/vision_config.h"
#include "models/decoder/decoder_model.h"
#include "models/vision/vision_tower.h"

namespace megashard {

/// What QwenVlModel::prepare works out: the pictures of a batch and their tokens. Of a sequence on
/// several ranks: those that reach into this rank's rows.
struct PicturePlan : InputPlan {
  VisionPlan vision{};         ///< of all images, then all videos
  at::Tensor token_indices{};  ///< of features in this rank's tokens, as PicturePlaces; on the CPU
  /// [features] int64, on the CPU: which of the tower's features these are, where other ranks have
  /// tokens of some. Undefined: the first ones.
  at::Tensor own_features{};
  /// No pictures, but other ranks may have some: the tower runs on one empty unit whose features
  /// are left out, so that its collectives happen and its gradients are zeros.
  bool dummy_image = false;
};

/// `model`: the tower's features take the places of their tokens in the decoder.
class QwenVlStack : public torch::nn::Module {
 public:
  QwenVlStack(const VisionLanguageConfig& config, const Network& text, const BuildContext& context);

  LayerOutput forward(const Batch& input);  // [B, T, C]
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Hooked<VisionTower>>& visual() const { return visual_; }
  const std::shared_ptr<Hooked<DecoderStack>>& language_model() const { return language_model_; }

 private:
  VisualInput encode_images(const Batch& input);

  std::string class_name_;
  VisionConfig vision_;
  std::shared_ptr<Hooked<VisionTower>> visual_;
  std::shared_ptr<Hooked<DecoderStack>> language_model_;
};

/// Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: `model.visual`, `model.language_model` and `lm_head`.
/// The batch's columns of items are pixel_values and pixel_values_videos [patches, C * T * S * S],
/// image_grid_thw and video_grid_thw [pictures, 3] int64, and second_per_grid_ts [videos], as
/// Hugging Face's processors give them, in the order of the batch; any may be absent. Position ids
/// follow from them and the tokens unless they are given.
class QwenVlModel : public ExpertParallelModule, public PublishedWeights {
 public:
  QwenVlModel(VisionLanguageConfig config, Network network, BuildContext context = {}, WeightFiles weight_files = {});

  ModelOutput forward(Batch input) override;
  /// Throws one error for pictures that do not fit the tokens or each other. Of a sequence on
  /// several ranks every rank gives all tokens and pictures, and keeps the pictures of its rows.
  void prepare(Batch& input) const override;
  std::string class_name() const override { return network_.config.names.model; }
  int64_t vocab_size() const override { return network_.config.vocab_size; }
  void check_sequence_ranks(int64_t ranks) const override;
  /// The decoder's; the tower's depend on the pictures and are left out.
  double training_flops(int64_t sequences, int64_t sequence_length) const override;
  /// The tower's q, k and v, one behind the other.
  std::vector<int64_t> qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const override {
    return name.ends_with(".attn.qkv.weight") ? std::vector<int64_t>(3, sizes[0] / 3) : std::vector<int64_t>();
  }
  const WeightFiles& weight_files() const override { return weight_files_; }
  const VisionLanguageConfig& config() const { return config_; }

 protected:
  const MoeConfig& moe_config() const override { return network_.config.moe; }
  const BuildContext& context() const override { return context_; }
  std::vector<std::string> default_modules_to_wrap() const override;
  std::vector<std::string> patterns_of_part(const std::string& part) const override;
  OtherPaths megatron_paths() const override;
  std::optional<bool> cast_forward_inputs(const NamedModule& each) const override;
  bool keeps_fp32(const std::string& name) const override;

 private:
  VisionLanguageConfig config_;
  Network network_;  // of the text
  BuildContext context_;
  WeightFiles weight_files_;
  std::shared_ptr<Hooked<QwenVlStack>> model_;
  std::shared_ptr<Hooked<Linear>> lm_head_;
};

}  // namespace megashard
