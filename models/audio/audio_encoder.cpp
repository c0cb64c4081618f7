#include "models/audio/audio_encoder.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "models/audio/audio_tower.h"
#include "models/vision/mrope_positions.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

/// The clips of a batch that reach into this rank's rows, and their tokens.
struct ClipPlan : InputPlan {
  AudioPlan audio{};
  at::Tensor token_indices{};  ///< [N] int64 on the CPU: tokens of this rank's rows that features replace
  at::Tensor own_features{};   ///< [N] int64 on the CPU: those features, if other ranks have others; undefined: all
};

/// Takes the lengths to the host, and checks that they describe the frames.
at::Tensor take_lengths(const AudioConfig& config, Batch& input) {
  const auto frames = input.find(kAudioFrames);
  auto lengths = input.take(kAudioLengths);
  TORCH_CHECK(frames.defined() == lengths.defined(), "the input has ", frames.defined() ? kAudioFrames : kAudioLengths,
              " without ", frames.defined() ? kAudioLengths : kAudioFrames, ": give both, or none");
  if (!frames.defined() || lengths.numel() == 0) return {};
  lengths = lengths.to(at::kCPU).contiguous();
  TORCH_CHECK(frames.dim() == 2 && frames.size(1) == config.mel_bins && lengths.min().item<int64_t>() > 0 &&
                  lengths.sum().item<int64_t>() == frames.size(0),
              kAudioFrames, " ", frames.sizes(), " must be [frames, ", config.mel_bins, "], with as many frames as ",
              kAudioLengths, " says: prepare the sound by this model's own processor");
  return lengths;
}

class AudioEncoder final : public Encoder {
 public:
  explicit AudioEncoder(AudioConfig config)
      : config_(std::move(config)), tower_(std::make_shared<Hooked<AudioTower>>(config_)) {
    if (config_.has_projector) projector_ = std::make_shared<Hooked<AudioProjector>>(config_);
  }

  EncoderModules modules() override { return modules_of(*this); }

  void prepare(Batch& input) const override {
    const auto plan = std::make_shared<ClipPlan>();
    if (auto lengths = take_lengths(config_, input); lengths.defined()) {
      plan->audio = plan_audio(config_, lengths);
      plan->token_indices = input.tokens().cpu().flatten().eq(config_.token_id).nonzero().squeeze(1);
      const int64_t features = plan->audio.rows.size(0), marked = plan->token_indices.size(0);
      TORCH_CHECK(features == marked, "the ", lengths.numel(), " clips of ", kAudioLengths, " have ", features,
                  " features, but ", marked, " tokens ", config_.token_id,
                  " stand for them: tokenise the text by the model's own processor, and do not cut it inside a clip");
      if (!input.sequence.is_whole()) keep_own_clips(*plan, input, lengths);
    }
    if (plan->audio.frames == 0 && any_is_sharded(modules_of(*this))) {  // joins the collectives of other ranks
      plan->audio = plan_audio(config_, at::tensor({int64_t{1}}));
      plan->token_indices = at::zeros({0}, at::kLong);
      input.take(kAudioFrames);
    }
    input.plan = plan;
  }

  InjectedEmbeddings encode(const Batch& input) override {
    const auto& plan = dynamic_cast<const ClipPlan&>(*input.plan);
    if (plan.audio.frames == 0) return {};
    const auto device = input.tokens().device();
    auto frames = input.find(kAudioFrames);
    if (!frames.defined()) frames = at::zeros({plan.audio.frames, config_.mel_bins}, at::device(device));
    auto features = tower_->forward(frames, plan.audio);
    if (projector_) features = projector_->forward(features);
    const auto& own = plan.own_features;
    return {.token_indices = on_device(plan.token_indices, device),
            .features = own.defined() ? features.index_select(0, on_device(own, device))
                                      : features.narrow(0, 0, plan.token_indices.size(0)),
            .deepstack = {}};
  }

 private:
  static EncoderModules modules_of(const AudioEncoder& encoder) {
    EncoderModules modules{{"audio_tower", encoder.tower_}};
    if (encoder.projector_) modules.emplace_back("multi_modal_projector", encoder.projector_);
    return modules;
  }

  /// A clip on the border of two ranks is heard by both; each gives gradients to the features of its own rows.
  void keep_own_clips(ClipPlan& plan, Batch& input, const at::Tensor& lengths) const {
    auto own = items_in_rows(plan.token_indices, plan.audio.counts, input.sequence);
    plan.token_indices = std::move(own.token_indices);
    plan.own_features = std::move(own.features);
    input.set(kAudioFrames, rows_of_items(input.take(kAudioFrames), lengths, own.items), Axis::kItem);
    const auto kept = rows_of_items(lengths, at::ones_like(lengths), own.items);
    plan.audio = kept.defined() ? plan_audio(config_, kept) : AudioPlan();
  }

  AudioConfig config_;
  std::shared_ptr<Hooked<AudioTower>> tower_;
  std::shared_ptr<Hooked<AudioProjector>> projector_;  // null: the tower ends in its own layers
};

class AudioSpec final : public EncoderSpec {
 public:
  explicit AudioSpec(AudioConfig config) : config_(std::move(config)) {}

  std::shared_ptr<Encoder> build() const override { return std::make_shared<AudioEncoder>(config_); }
  std::string owner_class() const override { return config_.model_name; }
  std::vector<EncoderTower> towers() const override { return {{"audio_tower", "audio_encoder", "layers.{*}"}}; }

 private:
  AudioConfig config_;
};

}  // namespace

EncoderSpecPtr audio_encoder(AudioConfig config) { return std::make_shared<AudioSpec>(std::move(config)); }

}  // namespace megashard
