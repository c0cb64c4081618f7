#include <algorithm>

#include "framework/arguments/argument_table.h"
#include "framework/objectives/aggregation.h"
#include "launch/roll/roll_keys.h"

namespace megashard {
namespace {

using V = YamlValue;
using W = RollWorker;
using A = Arguments;

/// Notes that the file's loss cannot be trained here.
void refuse_loss(const V& value, W& worker, const std::string& why) {
  worker.loss.refused.push_back(yaml_place(value.source, value.node) + value.key + " is " +
                                (value.node.IsScalar() ? value.text() : "given") + ", but " + why + ".");
}

/// A key that ROLL's controller reads, and whose value matters to importance_sampling: seq.
void note_uneven(const V& value, W& worker, bool is_uneven) {
  worker.unused.push_back(value.key);
  if (is_uneven) worker.loss.uneven.push_back(value.key + " " + value.text());
}

template <double RollLoss::*field>
void take_number(const V& value, W& worker, A&) {
  worker.loss.*field = value.number();
}

template <bool RollLoss::*field>
void take_truth(const V& value, W& worker, A&) {
  worker.loss.*field = value.boolean();
}

template <int64_t RollLoss::*field>
void take_count(const V& value, W& worker, A&) {
  worker.loss.*field = value.integer(1);
}

void take_steps(const V& value, W& worker, A&) { worker.loss.max_steps = value.integer(1); }

constexpr char kDpoBeta[] = "--dpo-beta", kDpoSmoothing[] = "--dpo-label-smoothing";
template <const char* flag>
void take_flag(const V& value, W&, A& arguments) {
  set_option(*find_option(flag), value, arguments);
}

/// A key of rlvr workers that must have its default here.
template <bool is_weight>
void take_default(const V& value, W& worker, A&) {
  const bool differs = is_weight ? value.boolean() : value.number() != 1;
  if (!worker.loss.is_rlvr()) return worker.unused.push_back(value.key);
  if (!differs) return;
  refuse_loss(value, worker,
              is_weight ? "answers are not weighed here; write false" : "the loss is not scaled here; write 1");
}

void take_aggregation(const V& value, W& worker, A&) {
  worker.loss.aggregation = value.text();
  const auto& names = aggregation_names();
  if (std::ranges::find(names, worker.loss.aggregation) == names.end()) value.expected_one_of(names);
}

void take_importance(const V& value, W& worker, A&) {
  const auto text = value.text();
  if (text != "token" && text != "seq") value.expected_one_of({"token", "seq"});
  if (worker.loss.actor != RollActor::kRlvr) return worker.unused.push_back(value.key);
  if (text == "seq") worker.loss.answer_ratio = yaml_place(value.source, value.node) + value.key;
}

void take_ratio(const V& value, W& worker, A&) {
  const auto text = value.text();
  if (text != "token" && text != "segment") value.expected_one_of({"token", "segment"});
  if (!worker.loss.is_agentic()) return worker.unused.push_back(value.key);
  if (text == "segment") refuse_loss(value, worker, "there are no ratios of turns here; write token");
}

constexpr char kEntropy[] = "--policy-entropy-coefficient";

void take_entropy(const V& value, W&, A& arguments) {
  if (value.number() > 0) arguments.objective_options[kEntropy] = value.number();
}

/// Reads the known keys of a map in train_infer_correction.
class Correction {
 public:
  Correction(const V& value, const std::vector<std::string>& known) : value_(value) {
    if (!value.node.IsMap()) value.expected("a map");
    for (const auto& item : value.node) {
      const auto name = item.first.Scalar();
      if (std::ranges::find(known, name) == known.end())
        throw UsageError(unknown_key(yaml_place(value.source, item.first), value.key + "." + name, known));
    }
  }

  std::optional<V> find(const std::string& name) const {
    const YAML::Node node = value_.node[name];
    if (!node.IsDefined()) return std::nullopt;
    return V{value_.source, value_.key + "." + name, node, value_.names};
  }
  bool enabled() const {
    const auto enabled = find("enabled");
    return enabled && enabled->boolean();
  }

 private:
  const V& value_;
};

void take_token_weights(const V& value, W& worker, A& arguments) {
  const Correction weights(value, {"enabled", "weight_type", "upper_bound", "detach"});
  if (!weights.enabled()) return;
  if (worker.loss.actor == RollActor::kBase) return worker.unused.push_back(value.key);
  const auto type = weights.find("weight_type"), bound = weights.find("upper_bound");
  if (type && type->text() != "token") refuse_loss(*type, worker, "only tokens have weights here; write token");
  if (bound && bound->is_null()) return refuse_loss(*bound, worker, "weights need a bound here; write a number");
  arguments.objective_options["--policy-infer-correction"] = bound ? bound->number() : 1.2;
  worker.loss.uneven.push_back(value.key);
}

void take_correction(const V& value, W& worker, A& arguments) {
  const Correction parts(value, {"is_weight", "filters"});
  if (const auto weights = parts.find("is_weight"); weights && !weights->is_null())
    take_token_weights(*weights, worker, arguments);
  const auto filters = parts.find("filters");
  if (!filters || filters->is_null()) return;
  if (!filters->node.IsSequence()) filters->expected("a list of maps");
  for (const auto& item : filters->node) {
    const V each{value.source, filters->key, item, value.names};
    const Correction filter(each, {"enabled", "agg_type", "ratio_enabled", "ratio_low", "ratio_high", "diff_enabled",
                                   "diff_low", "diff_high"});
    if (filter.enabled())
      refuse_loss(each, worker, "tokens are not left out here; give the data the loss_mask that is left");
  }
}

const RollKey kPairKeys[] = {
    {"max_steps", take_steps},
    {"beta", take_flag<kDpoBeta>, false, kDpoBeta},
    {"label_smoothing", take_flag<kDpoSmoothing>, false, kDpoSmoothing},
    {"ipo", take_truth<&RollLoss::ipo>},
};

constexpr char kValueClip[] = "--value-clip";

/// A model of the pipeline that is this worker's unless it names one itself.
void take_model(const V& value, W&, A& arguments) {
  if (!arguments.hf_model) set_option(*find_option("--hf-model"), value, arguments);
}

const RollKey kValueKeys[] = {
    {"max_steps", take_steps},
    {"rollout_batch_size", take_count<&RollLoss::rollout_batch_size>},
    {"num_return_sequences_in_group", take_count<&RollLoss::answers_of_prompt>},
    {"ppo_epochs", take_count<&RollLoss::ppo_epochs>},
    {"value_clip", take_flag<kValueClip>, false, kValueClip},
    {"reward_pretrain", take_model},
    {"pretrain"},
};

constexpr char kDistillWeight[] = "--distill-weight", kDivergence[] = "--distill-divergence",
               kTemperature[] = "--distill-temperature", kTeacherTemperature[] = "--distill-teacher-temperature",
               kAlpha[] = "--distill-adaptive-alpha", kSkew[] = "--distill-skew";

void take_top(const V& value, W& worker, A&) {
  if (value.integer(0) == 0)
    return refuse_loss(value, worker, "a teacher's whole vocabulary is not read here; write a number of tokens");
  worker.unused.push_back(value.key + ": the data have so many tokens as they have");
}

const RollKey kDistilledKeys[] = {
    {"distill_loss_weight", take_flag<kDistillWeight>, false, kDistillWeight},
    {"kd_objective", take_flag<kDivergence>, false, kDivergence},
    {"kd_temperature", take_flag<kTemperature>, false, kTemperature},
    {"teacher_temperature", take_flag<kTeacherTemperature>, false, kTeacherTemperature},
    {"adaptive_kl_alpha", take_flag<kAlpha>, false, kAlpha},
    {"skew_lambda", take_flag<kSkew>, false, kSkew},
    {"logits_topk", take_top},
    {"student_pretrain", take_model},
    {"pretrain"},
};

const RollKey kAnswerKeys[] = {
    {"max_steps", take_steps},
    {"rollout_batch_size", take_count<&RollLoss::rollout_batch_size>},
    {"num_return_sequences_in_group", take_count<&RollLoss::answers_of_prompt>},
    {"ppo_epochs", take_count<&RollLoss::ppo_epochs>},
    {"pg_clip", take_number<&RollLoss::clip>},
    {"use_pg_clip_range", take_truth<&RollLoss::has_clip_range>},
    {"pg_clip_low", take_number<&RollLoss::clip_low>, false, "--policy-clip-low"},
    {"pg_clip_high", take_number<&RollLoss::clip_high>, false, "--policy-clip-high"},
    {"dual_clip_loss", take_truth<&RollLoss::has_dual_clip>},
    {"loss_agg_mode", take_aggregation, false, "--policy-aggregation"},
    {"use_kl_loss", take_truth<&RollLoss::has_kl>},
    {"kl_loss_coef", take_number<&RollLoss::kl>, false, "--policy-kl"},
    {"entropy_loss_coef", take_entropy, false, kEntropy},
    {"importance_sampling", take_importance},
    {"ratio_type", take_ratio},
    {"rl_loss_coef", take_default</*is_weight=*/false>},
    {"difficulty_loss_weight", take_default</*is_weight=*/true>},
    {"length_loss_weight", take_default</*is_weight=*/true>},
    {"train_infer_correction", take_correction, false, "--policy-infer-correction"},
    {"adv_estimator",
     [](const V& value, W& worker, A&) {
       worker.loss.estimator = value.text();
       worker.unused.push_back(value.key);
     }},
    {"gamma", [](const V& value, W& worker, A&) { note_uneven(value, worker, value.number() != 1); }},
    {"add_token_level_kl", [](const V& value, W& worker, A&) { note_uneven(value, worker, value.boolean()); }},
    {"whiten_rewards", [](const V& value, W& worker, A&) { note_uneven(value, worker, value.boolean()); }},
    {"is_pure_opd", [](const V& value, W& worker, A&) { note_uneven(value, worker, value.boolean()); }},
    {"use_opd", [](const V& value, W& worker, A&) { note_uneven(value, worker, value.boolean()); }},
};

void take_variant(const V& value, W& worker, A&) {
  static const std::vector<std::string> known{"vanilla", "ppo", "tis", "topr", "cispo", "kimi15"};
  const auto text = value.text();
  if (std::ranges::find(known, text) == known.end()) value.expected_one_of(known);
  if (!worker.loss.has_variants()) return worker.unused.push_back(value.key);
  worker.loss.variant = text;
}

/// A weight of topr.
void take_weight(const V& value, W& worker, A&) {
  if (value.number() != 1 && worker.loss.has_variants())
    refuse_loss(value, worker, "answers are not weighed by their score here; write 1");
}

const RollKey kAnswerWorkerKeys[] = {
    {"pg_variant", take_variant, false, "--policy-loss"},
    {"topr_positive_weight", take_weight},
    {"topr_negative_weight", take_weight},
};

}  // namespace

std::span<const RollKey> roll_loss_keys(RollPipeline pipeline) {
  if (pipeline == RollPipeline::kPairs) return kPairKeys;
  if (pipeline == RollPipeline::kAnswers) return kAnswerKeys;
  if (pipeline == RollPipeline::kValues) return kValueKeys;
  if (pipeline == RollPipeline::kDistilled) return kDistilledKeys;
  return {};
}

std::span<const RollKey> roll_loss_worker_keys(RollPipeline pipeline) {
  if (pipeline == RollPipeline::kAnswers) return kAnswerWorkerKeys;
  return {};
}

}  // namespace megashard
