#include "launch/roll/roll_loss.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>

#include "framework/arguments/argument_table.h"
#include "framework/mistakes.h"
#include "framework/objectives/objectives.h"
#include "launch/roll/roll_worker.h"

namespace megashard {
namespace {

using std::to_string;

struct WorkerClass {
  const char* name;
  RollPipeline pipeline;
  RollActor actor = RollActor::kRlvr;
};

constexpr std::array kClasses{
    WorkerClass{"roll.pipeline.rlvr.actor_worker.ActorWorker", RollPipeline::kAnswers, RollActor::kRlvr},
    WorkerClass{"roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", RollPipeline::kAnswers, RollActor::kRlvrVariants},
    WorkerClass{"roll.pipeline.agentic.agentic_actor_worker.ActorWorker", RollPipeline::kAnswers, RollActor::kAgentic},
    WorkerClass{"roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker", RollPipeline::kAnswers,
                RollActor::kAgenticVariants},
    WorkerClass{"roll.pipeline.base_worker.ActorWorker", RollPipeline::kAnswers, RollActor::kBase},
    WorkerClass{"roll.pipeline.dpo.actor_worker.ActorWorker", RollPipeline::kPairs},
    WorkerClass{"roll.pipeline.sft.sft_worker.SFTWorker", RollPipeline::kTexts},
    WorkerClass{"roll.pipeline.base_worker.CriticWorker", RollPipeline::kValues},
    WorkerClass{"roll.pipeline.distill.distill_worker.StudentWorker", RollPipeline::kDistilled},
};

bool has_any_key(const YAML::Node& root, std::initializer_list<const char*> keys) {
  return std::ranges::any_of(keys, [&](const char* key) { return root[key].IsDefined(); });
}

RollPipeline pipeline_of_keys(const YAML::Node& root) {
  if (has_any_key(root, {"adv_estimator", "rewards", "custom_envs", "train_env_manager", "ppo_epochs", "pg_clip",
                         "num_return_sequences_in_group"}))
    return RollPipeline::kAnswers;
  if (has_any_key(root, {"beta", "ipo", "label_smoothing", "chosen_key", "rejected_key"})) return RollPipeline::kPairs;
  return has_any_key(root, {"rollout_batch_size"}) ? RollPipeline::kAnswers : RollPipeline::kTexts;
}

/// The loss of answers by ROLL's names.
std::string policy_loss(const RollLoss& loss) {
  if (loss.answer_ratio) return "gspo";
  if (loss.variant == "vanilla") return "reinforce";
  return loss.variant.empty() ? "ppo" : loss.variant;
}

void set_of_loss(Arguments& arguments, const std::string& flag, double value) {
  arguments.objective_options[flag] = value;
}

void set_of_loss(Arguments& arguments, const std::string& flag, const std::string& word) {
  const auto& words = find_option(flag)->choices;
  set_of_loss(arguments, flag, static_cast<double>(std::ranges::find(words, word) - words.begin()));
}

/// ROLL's gradient goes through the mean of the answer's ratios; gspo's through each token by itself. They are the same
/// if an answer's tokens have one advantage and one weight.
void check_answer_ratio(RollLoss& loss) {
  if (!loss.answer_ratio) return;
  const std::string& estimator = loss.estimator;
  auto uneven = loss.uneven;
  if (estimator != "reinforce" && estimator != "grpo") uneven.push_back("adv_estimator " + estimator);
  if (uneven.empty()) return;
  loss.refused.push_back(*loss.answer_ratio +
                         " is seq, which is gspo here if each answer has one advantage and weight, " + "and not with " +
                         c10::Join(", ", uneven) + "; write token, or change that.");
}

void take_pairs(const RollLoss& loss, RollWorker& worker, Arguments& arguments) {
  set_of_loss(arguments, "--dpo-loss-type", loss.ipo ? "ipo_sum" : "sigmoid");
  arguments.micro_batch_size = 2 * *arguments.micro_batch_size;
  worker.infer_batch_size *= 2;
}

void take_answers(RollLoss& loss, Arguments& arguments) {
  check_answer_ratio(loss);
  const std::string name = policy_loss(loss);
  set_of_loss(arguments, "--policy-loss", name);
  set_of_loss(arguments, "--policy-aggregation", loss.aggregation);
  if (name == "ppo" || name == "gspo") {
    set_of_loss(arguments, "--policy-clip-low", loss.has_clip_range ? loss.clip_low : loss.clip);
    set_of_loss(arguments, "--policy-clip-high", loss.has_clip_range ? loss.clip_high : loss.clip);
    if (loss.has_dual_clip) set_of_loss(arguments, "--policy-dual-clip", 1 + 2 * loss.clip);
  } else if (name == "cispo") {  // no key of ROLL's sets these
    set_of_loss(arguments, "--policy-clip-low", 0.1);
    set_of_loss(arguments, "--policy-clip-high", 0.1);
  }
  if (loss.has_kl) set_of_loss(arguments, "--policy-kl", loss.kl);
}

/// "--objective dpo --dpo-beta 0.1 ...": the loss and what was set of it.
std::string flags_of(const Arguments& arguments) {
  std::string flags = "--objective " + arguments.objective;
  for (const auto& kind : objectives()) {
    if (kind.name != arguments.objective) continue;
    for (const auto& option : kind.options) {
      if (arguments.objective_options.count(option.flag) == 0) continue;
      flags += " " + option.flag + " " + argument_text(find_option(option.flag)->read(arguments));
    }
  }
  return flags;
}

}  // namespace

std::string RollLoss::objective() const {
  if (pipeline == RollPipeline::kTexts) return kNextToken;
  if (pipeline == RollPipeline::kValues) return "value";
  if (pipeline == RollPipeline::kDistilled) return "distill";
  return pipeline == RollPipeline::kPairs ? "dpo" : pipeline == RollPipeline::kAnswers ? "policy" : "";
}

void find_roll_pipeline(const YAML::Node& root, const YamlValue& own, RollWorker& worker) {
  RollLoss& loss = worker.loss;
  const YAML::Node named = own.node["worker_cls"];
  if (named.IsDefined() && !named.IsNull()) {
    const YamlValue value{own.source, own.key + ".worker_cls", named, own.names};
    const auto text = value.text();
    const auto known = std::ranges::find_if(kClasses, [&](const auto& each) { return text == each.name; });
    loss.pipeline = known == kClasses.end() ? RollPipeline::kUnknown : known->pipeline;
    if (known != kClasses.end()) loss.actor = known->actor;
    if (known == kClasses.end()) {
      loss.refused.push_back(
          yaml_place(own.source, named) + value.key + " is " + text +
          ", a class whose loss is not known here; leave it out for ROLL's own, or give --objective.");
    }
  } else {
    loss.pipeline = worker.role == "sft_train" ? RollPipeline::kTexts
                    : worker.role == "student" ? RollPipeline::kDistilled
                    : worker.role == "critic"  ? RollPipeline::kValues
                                               : pipeline_of_keys(root);
    if (has_any_key(root, {"custom_envs", "train_env_manager"})) loss.actor = RollActor::kAgentic;
  }
}

void take_roll_loss(RollWorker& worker, Arguments& arguments) {
  RollLoss& loss = worker.loss;
  if (loss.has_variants() && loss.variant.empty()) {
    loss.refused.push_back(worker.role + ".worker_cls needs pg_variant: vanilla, ppo, tis, topr, cispo or kimi15.");
  }
  if (const auto name = loss.objective(); !name.empty()) arguments.objective = name;
  if (worker.role == "sft_train") arguments.calculate_per_token_loss = true;
  if (loss.pipeline == RollPipeline::kPairs) take_pairs(loss, worker, arguments);
  if (loss.pipeline == RollPipeline::kAnswers) take_answers(loss, arguments);
  if (loss.pipeline == RollPipeline::kValues) set_of_loss(arguments, "--value-aggregation", "seq-mean-token-mean");
}

bool is_roll_loss_replaced(const RollWorker& worker, const Arguments& arguments) {
  return arguments.is_given("objective") && arguments.objective != worker.loss.objective();
}

void check_roll_loss(const RollWorker& worker, Arguments& arguments, const DiagnosticSink& sink) {
  const RollLoss& loss = worker.loss;
  const std::string about = "ROLL: " + worker.role + ": ";
  if (is_roll_loss_replaced(worker, arguments)) {
    return sink(Severity::kNotice, about + "--objective " + arguments.objective + " replaces the loss of the file");
  }
  if (!loss.refused.empty()) throw UsageErrors(loss.refused);
  if (loss.pipeline == RollPipeline::kTexts) return;
  // ROLL divides the sum over all answers by the length of a row alone.
  if (loss.pipeline == RollPipeline::kAnswers && loss.aggregation == "seq-mean-token-sum-norm" && arguments.seq_length)
    arguments.objective_options.try_emplace("--policy-sum-norm", static_cast<double>(*arguments.seq_length - 1) /
                                                                     static_cast<double>(*arguments.global_batch_size));
  sink(Severity::kNotice, about + "its loss is " + flags_of(arguments));
}

std::optional<int64_t> roll_pipeline_steps(const RollWorker& worker, int64_t global_batch,
                                           const std::function<int64_t()>& of_epochs, const DiagnosticSink& sink) {
  constexpr int64_t kDefaultSteps = 500;
  const RollLoss& loss = worker.loss;
  if (!loss.max_steps && worker.max_steps > 0) return worker.max_steps;
  const int64_t steps = loss.max_steps.value_or(kDefaultSteps);
  if (loss.pipeline == RollPipeline::kPairs) return std::min(steps, of_epochs());
  if (loss.pipeline != RollPipeline::kAnswers && loss.pipeline != RollPipeline::kValues) return std::nullopt;
  const int64_t answers = loss.is_agentic() ? 1 : loss.answers_of_prompt;
  const int64_t iterations =
      std::max<int64_t>(1, steps * loss.rollout_batch_size * answers * loss.ppo_epochs / global_batch);
  sink(Severity::kNotice, "ROLL: " + worker.role + ": max_steps " + to_string(steps) + " of " +
                              to_string(loss.rollout_batch_size) + " * " + to_string(answers) +
                              " answers * ppo_epochs " + to_string(loss.ppo_epochs) + ", " + to_string(global_batch) +
                              " an iteration, are " + to_string(iterations) + " iterations");
  return iterations;
}

}  // namespace megashard
