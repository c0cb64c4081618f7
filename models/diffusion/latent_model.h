#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/weights/weight_map.h"
#include "framework/latent_columns.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/weight_init_mixin.h"

namespace megashard {

/// Column [B] fp32 of Flux: the scale of guidance that a distilled model learned; absent: 1.
inline constexpr const char* kGuidance = "guidance";

/// Describes a model of latents to its base.
struct LatentSpec {
  std::string class_name{};  ///< diffusers', for wrap policies
  LatentPatches patches{};
  bool channels_last = false;  ///< predictions have a patch's values in the order frame, row, column, channel
  int64_t num_heads = 0;
  std::vector<std::string> blocks{};        ///< patterns of the blocks, which are units
  std::vector<WeightRenaming> renamings{};  ///< in files
  std::vector<std::string> in_fp32{};       ///< parts of paths of parameters that stay in fp32 (_keep_in_fp32_modules)
  bool takes_second_text = false;           ///< kSecondText
  bool takes_sounds = false;                ///< kSounds
};

/// Base of diffusion transformers: from noisy patches (kLatents) the prediction of a target of the same sizes.
/// Parameters start without values: load_hf_weights(), a checkpoint or init_weights() gives them.
class LatentModel : public MultiModalModule, public FSDP2Mixin, public WeightInitMixin {
 public:
  explicit LatentModel(LatentSpec spec);

  /// token_losses of a batch with kTargets, predictions of one without.
  ModelOutput forward(Batch input) override;
  std::string class_name() const override { return spec_.class_name; }
  std::optional<LatentPatches> latent_patches() const override { return spec_.patches; }
  void check_sequence_ranks(int64_t ranks) const override;
  void check_sequence_ring() const override {}
  bool keeps_fp32(const std::string& name) const override;
  WeightMap weight_map() const override;

 protected:
  /// Patches [B, T, in_values]: latents and, if the model takes more values of a patch, kConditions behind them.
  at::Tensor with_conditions(const Batch& input, int64_t in_values) const;
  /// Throws unless the batch has this model's latents, and nothing that it does not take.
  void check_input(const Batch& input) const;
  /// forward()'s result from that of predict().
  ModelOutput output_of(const Batch& input, const at::Tensor& prediction) const;
  /// [B, T, P], of this rank's rows.
  virtual at::Tensor predict(const Batch& input) = 0;
  /// Inputs have the dtypes that the models need: timesteps and noise are fp32.
  std::optional<bool> cast_forward_inputs(const NamedModule& /*each*/) const override { return false; }
  std::vector<std::string> default_modules_to_wrap() const override { return spec_.blocks; }

  const LatentSpec& spec() const { return spec_; }

 private:
  /// A prediction [B, T, P], as [P / box, box, B, T] with the box of a patch's frames, rows and columns.
  at::Tensor channels_first(const at::Tensor& prediction) const;

  LatentSpec spec_;
};

/// kTokenMask of the whole sequence; undefined: there is no padding. Collective.
at::Tensor key_mask_of(const Batch& input);

}  // namespace megashard
