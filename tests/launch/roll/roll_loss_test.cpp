#include "launch/roll/roll_loss.h"

#include <gmock/gmock.h>

#include "framework/arguments/argument_table.h"
#include "launch/roll/roll_worker.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::HasSubstr;

/// What the log says of one: "--objective policy --policy-loss ppo ...".
std::string flag_text(const Arguments& arguments, const std::string& flag) {
  return argument_text(find_option(flag)->read(arguments));
}

struct Trained {
  Arguments arguments;
  std::string told;

  std::string operator[](const std::string& flag) const { return flag_text(arguments, flag); }
};

/// A worker of two ranks whose data have 40 sequences; `flags`: of the command line.
Trained train(const std::string& pipeline, const std::string& keys = "", const std::vector<std::string>& flags = {},
              const std::string& role = "actor_train") {
  Trained trained;
  CollectedDiagnostics told;
  const std::string text =
      pipeline + "\n" + role +
      ": {strategy_args: {}, training_args: {per_device_train_batch_size: " + "2, gradient_accumulation_steps: 2}, " +
      keys + "}";
  RollWorker worker = parse_roll_worker(text, "x.yaml", role, trained.arguments);
  for (size_t i = 0; i < flags.size(); i += 2)
    set_option(*find_option(flags[i]), std::vector{flags[i + 1]}, trained.arguments);
  apply_roll_worker(
      worker, trained.arguments, 2, [] { return 40; }, told.sink());
  trained.told = told.text();
  return trained;
}

constexpr const char* kRlvr = "adv_estimator: reinforce\nrewards: {math: {}}\nprompt_length: 20\nresponse_length: 44\n"
                              "max_steps: 3\nrollout_batch_size: 16\nnum_return_sequences_in_group: 4\n";

/// The same with more keys.
std::string rlvr(const std::string& more) { return kRlvr + more; }

constexpr const char* kVariants = "worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker, pg_variant: ";

TEST(RollLoss, PairsAreDpo) {
  const std::string keys = "beta: 0.3\nlabel_smoothing: 0.1\nchosen_key: chosen\nsequence_length: 16\n";
  const auto dpo = train(keys + "ipo: false\nmax_steps: 4\n");
  EXPECT_EQ(dpo.arguments.objective, "dpo");
  EXPECT_EQ(dpo["--dpo-beta"], "0.3");
  EXPECT_EQ(dpo["--dpo-label-smoothing"], "0.1");
  EXPECT_EQ(dpo["--dpo-loss-type"], "sigmoid");
  EXPECT_EQ(dpo.arguments.micro_batch_size, 4) << "answers of two pairs";
  EXPECT_EQ(dpo.arguments.global_batch_size, 4 * 2 * 2);
  EXPECT_EQ(dpo.arguments.train_iters, 2) << "one epoch of 40 answers, and not max_steps";
  EXPECT_EQ(train(keys + "ipo: true\nmax_steps: 1\n").arguments.train_iters, 1);
  EXPECT_EQ(train(keys + "ipo: true")["--dpo-loss-type"], "ipo_sum");
  EXPECT_THAT(dpo.told, HasSubstr("its loss is --objective dpo --dpo-beta 0.3 --dpo-loss-type sigmoid"));
  EXPECT_EQ(train("", "worker_cls: roll.pipeline.dpo.actor_worker.ActorWorker").arguments.objective, "dpo");
  EXPECT_EQ(train(keys, "", {"--micro-batch-size", "2"}).arguments.global_batch_size, 2 * 2 * 2);
}

TEST(RollLoss, AnswersAreAPolicy) {
  const auto plain = train(kRlvr);
  EXPECT_EQ(plain.arguments.objective, "policy");
  EXPECT_EQ(plain["--policy-loss"], "ppo");
  EXPECT_EQ(plain["--policy-aggregation"], "seq-mean-token-mean");
  EXPECT_EQ(plain["--policy-clip-low"], "0.2");
  EXPECT_EQ(plain["--policy-dual-clip"], "0.0");
  EXPECT_EQ(plain["--policy-kl"], "0.0");
  EXPECT_EQ(plain["--policy-kl-estimator"], "k3");
  EXPECT_EQ(plain.arguments.seq_length, 20 + 44);
  EXPECT_EQ(plain.arguments.micro_batch_size, 2);
  EXPECT_EQ(plain.arguments.train_iters, 3 * 16 * 4 / (2 * 2 * 2));
  EXPECT_THAT(plain.told, HasSubstr("max_steps 3 of 16 * 4 answers * ppo_epochs 1, 8 an iteration, are 24 iterations"));

  const auto all =
      train(rlvr("pg_clip: 0.1\nuse_pg_clip_range: true\npg_clip_low: 0.3\ndual_clip_loss: true\n"
                 "loss_agg_mode: token-mean\nuse_kl_loss: true\nkl_loss_coef: 0.01\nppo_epochs: 2\n"
                 "train_infer_correction: {is_weight: {enabled: true, upper_bound: 1.5}, filters: [{enabled: "
                 "false}]}\nentropy_loss_coef: 0.02\nrl_loss_coef: 1\nlength_loss_weight: false"));
  EXPECT_EQ(all["--policy-clip-low"], "0.3");
  EXPECT_EQ(all["--policy-clip-high"], "0.2");
  EXPECT_EQ(all["--policy-dual-clip"], "1.2") << "by pg_clip, not by the range";
  EXPECT_EQ(all["--policy-aggregation"], "token-mean");
  EXPECT_EQ(all["--policy-kl"], "0.01");
  EXPECT_EQ(all["--policy-infer-correction"], "1.5");
  EXPECT_EQ(all["--policy-entropy-coefficient"], "0.02");
  EXPECT_EQ(all.arguments.train_iters, 48);
  EXPECT_EQ(train(rlvr("use_kl_loss: false\nkl_loss_coef: 0.01"))["--policy-kl"], "0.0");
  const auto norm = train(rlvr("loss_agg_mode: seq-mean-token-sum-norm"));
  EXPECT_EQ(norm["--policy-sum-norm"], "7.875") << "63 tokens, by 8 answers, which ROLL does not divide by";
}

TEST(RollLoss, AgenticFilesHaveOneAnswerATrajectory) {
  const auto agentic = train("adv_estimator: grpo\ncustom_envs: {}\nsequence_length: 16\nrollout_batch_size: 16\n"
                             "max_steps: 3\nnum_return_sequences_in_group: 4\nratio_type: token\nrl_loss_coef: 2");
  EXPECT_EQ(agentic["--policy-loss"], "ppo");
  EXPECT_EQ(agentic.arguments.train_iters, 6);
  EXPECT_EQ(train("rollout_batch_size: 16").arguments.train_iters, 500 * 16 / 8) << "ROLL's default of max_steps";
}

TEST(RollLoss, VariantsHaveNames) {
  for (const auto& [variant, loss] :
       {std::pair("vanilla", "reinforce"), std::pair("ppo", "ppo"), std::pair("tis", "tis"), std::pair("topr", "topr"),
        std::pair("cispo", "cispo"), std::pair("kimi15", "kimi15")}) {
    const auto trained = train(kRlvr, kVariants + std::string(variant));
    EXPECT_EQ(trained["--policy-loss"], loss);
    EXPECT_EQ(trained["--policy-clip-high"], loss == std::string("cispo") ? "0.1" : "0.2");
  }
  EXPECT_EQ(train(kRlvr, "pg_variant: tis")["--policy-loss"], "ppo") << "only ActorPGWorker reads it";
  EXPECT_EQ(
      train("adv_estimator: grpo\ncustom_envs: {}\nsequence_length: 16",
            "pg_variant: tis, worker_cls: roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker")["--policy-loss"],
      "tis");
}

TEST(RollLoss, RatiosOfAnswersAreGspoWhereTheGradientsAreTheSame) {
  EXPECT_EQ(train(rlvr("importance_sampling: seq"))["--policy-loss"], "gspo");
  EXPECT_EQ(train(rlvr("importance_sampling: seq\ngamma: 1\nadd_token_level_kl: false"))["--policy-loss"], "gspo");
  EXPECT_EQ(train(rlvr("importance_sampling: seq"), kVariants + std::string("ppo"))["--policy-loss"], "ppo");
  for (const char* uneven : {"gamma: 0.9", "add_token_level_kl: true", "use_opd: true",
                             "train_infer_correction: {is_weight: {enabled: true}}"}) {
    const auto message = usage_error([&] { train(rlvr(std::string("importance_sampling: seq\n") + uneven)); });
    EXPECT_THAT(message, HasSubstr("x.yaml:8: importance_sampling is seq, which is gspo here if each answer has one"));
  }
  EXPECT_THAT(usage_error([] { train("adv_estimator: gae\nimportance_sampling: seq\nsequence_length: 8"); }),
              HasSubstr("and not with adv_estimator gae"));
}

TEST(RollLoss, CriticsLearnValues) {
  const auto plain = train(kRlvr, "", {}, "critic");
  EXPECT_EQ(plain.arguments.objective, "value");
  EXPECT_EQ(plain["--value-aggregation"], "seq-mean-token-mean");
  EXPECT_EQ(plain["--value-clip"], "0.0");
  EXPECT_EQ(plain.arguments.train_iters, 3 * 16 * 4 / (2 * 2 * 2)) << "as many as of the actor";
  EXPECT_THAT(plain.told, HasSubstr("critic: its loss is --objective value --value-aggregation seq-mean-token-mean"));
  const auto clipped =
      train(rlvr("value_clip: 0.5\nentropy_loss_coef: 1"), "model_args: {model_type: trl}", {}, "critic");
  EXPECT_EQ(clipped["--value-clip"], "0.5");
  EXPECT_EQ(train(rlvr("pretrain: a\nreward_pretrain: b"), "", {}, "critic").arguments.hf_model, "b");
  EXPECT_THAT(clipped.told, HasSubstr("critic.model_args.model_type: the head of a critic is `score`"));
  EXPECT_EQ(train(kRlvr, "worker_cls: roll.pipeline.base_worker.CriticWorker").arguments.objective, "value");
  EXPECT_THAT(usage_error([] { train(kRlvr, "model_args: {model_type: trl}"); }),
              HasSubstr("model_type is trl, but only a critic has another head here; remove it"));
}

TEST(RollLoss, StudentsLearnATeachersProbabilities) {
  const auto plain = train("student_pretrain: a\npretrain: b\nlogits_topk: 8\nsequence_length: 16", "", {}, "student");
  EXPECT_EQ(plain.arguments.objective, "distill");
  EXPECT_EQ(plain.arguments.hf_model, "a");
  EXPECT_EQ(plain["--distill-weight"], "0.5");
  EXPECT_EQ(plain["--distill-divergence"], "forward_kl");
  EXPECT_EQ(plain.arguments.train_iters, 40 / 8 * 1) << "an epoch";
  const auto all = train("distill_loss_weight: 0.85\nkd_objective: adaptive_kl\nkd_temperature: 2\n"
                         "teacher_temperature: 0.5\nadaptive_kl_alpha: 0.4\nskew_lambda: 0.2",
                         "", {}, "student");
  EXPECT_THAT(all.told, HasSubstr("its loss is --objective distill --distill-weight 0.85 --distill-divergence "
                                  "adaptive_kl --distill-temperature 2.0 --distill-teacher-temperature 0.5 "
                                  "--distill-adaptive-alpha 0.4 --distill-skew 0.2"));
  EXPECT_THAT(usage_error([] { train("logits_topk: 0", "", {}, "student"); }),
              HasSubstr("logits_topk is 0, but a teacher's whole vocabulary is not read here"));
  EXPECT_THAT(usage_error([] { train("kd_objective: kl", "", {}, "student"); }), HasSubstr("forward_kl"));
}

TEST(RollLoss, WhatIsNotHereIsRefusedByName) {
  struct Row {
    const char *pipeline, *worker, *message;
  };
  const Row rows[] = {
      {"rl_loss_coef: 0.5", "", "rl_loss_coef is 0.5, but the loss is not scaled here; write 1."},
      {"difficulty_loss_weight: true", "", "difficulty_loss_weight is true, but answers are not weighed here"},
      {"length_loss_weight: true", "", "length_loss_weight is true, but"},
      {"train_infer_correction: {filters: [{enabled: true}]}", "",
       "train_infer_correction.filters is given, but tokens"},
      {"train_infer_correction: {is_weight: {enabled: true, weight_type: sequence}}", "",
       "train_infer_correction.is_weight.weight_type is sequence, but only tokens have weights here"},
      {"train_infer_correction: {is_weight: {enabled: true, upper_bound: ~}}", "", "weights need a bound here"},
      {"train_infer_correction: {is_weigth: {}}", "", "did you mean is_weight?"},
      {"loss_agg_mode: mean", "", "loss_agg_mode takes one of token-mean, "},
      {"importance_sampling: sequence", "", "importance_sampling takes one of token, seq"},
      {"pg_clip: wide", "", "pg_clip takes a number"},
      {"custom_envs: {}\nratio_type: segment", "", "ratio_type is segment, but there are no ratios of turns here"},
      {"", "worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", "needs pg_variant: vanilla, ppo,"},
      {"", "worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker, pg_variant: topr, topr_negative_weight: 0.5",
       "actor_train.topr_negative_weight is 0.5, but answers are not weighed by their score here"},
      {"", "pg_variant: sapo", "pg_variant takes one of vanilla, ppo"},
      {"", "worker_cls: mine.Worker", "actor_train.worker_cls is mine.Worker, a class whose loss is not known here"},
  };
  for (const auto& [pipeline, worker, message] : rows)
    EXPECT_THAT(usage_error([&] { train(rlvr(pipeline), worker); }), HasSubstr(message)) << pipeline << worker;
}

TEST(RollLoss, TheCommandLineDecides) {
  const std::vector<std::string> texts{"--objective", "next-token"};
  const auto language = train(rlvr("rl_loss_coef: 0.5"), "", texts);
  EXPECT_EQ(language.arguments.objective, "next-token");
  EXPECT_EQ(language.arguments.train_iters, 40 / 8) << "an epoch of the data";
  EXPECT_THAT(language.told, HasSubstr("actor_train: --objective next-token replaces the loss of the file"));
  EXPECT_EQ(train("kd_objective: forward_kl", "", texts, "student").arguments.objective, "next-token");
  EXPECT_THAT(usage_error([] {
                train(rlvr("rl_loss_coef: 0.5"), "", {"--objective", "policy"});
              }),
              HasSubstr("the loss is not scaled here"));
  EXPECT_EQ(train(kRlvr, "", {"--policy-clip-low", "0.4"})["--policy-clip-low"], "0.4");
  EXPECT_EQ(train(kRlvr, "", {"--policy-clip-low", "0.4"})["--policy-clip-high"], "0.2");
  EXPECT_EQ(train(kRlvr, "", {"--seq-length", "9"}).arguments.seq_length, 9);
}

TEST(RollLoss, TextsAreNextTokens) {
  const auto sft = train("sequence_length: 16\nmax_steps: 7\nbeta: 3", "", {}, "sft_train");
  EXPECT_EQ(sft.arguments.objective, "next-token");
  EXPECT_TRUE(sft.arguments.calculate_per_token_loss);
  EXPECT_EQ(sft.arguments.train_iters, 5) << "an epoch";
  EXPECT_EQ(train("sequence_length: 16").arguments.objective, "next-token");
  Arguments arguments;
  const auto frozen =
      std::string(kRlvr) + "rl_loss_coef: 0.5\nreference: {strategy_args: {strategy_name: fsdp2_infer}}";
  parse_roll_worker(frozen, "x.yaml", "reference", arguments);
  EXPECT_EQ(arguments.objective, "next-token") << "a worker that is not trained has no loss";
  EXPECT_EQ(arguments.seq_length, 64);
}

}  // namespace
}  // namespace megashard
