#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"

namespace megashard {

struct RollWorker;

/// What ROLL trains a worker on.
enum class RollPipeline {
  kTexts,      ///< sft: the next token
  kPairs,      ///< dpo
  kAnswers,    ///< rlvr, agentic: sampled answers
  kValues,     ///< a critic
  kDistilled,  ///< a student
  kUnknown,    ///< a class of worker that is not ROLL's
};

/// Classes of workers that train on answers; they read different keys.
enum class RollActor { kRlvr, kRlvrVariants, kAgentic, kAgenticVariants, kBase };

/// The loss of a worker that is trained, as the file describes it. Defaults are ROLL's.
struct RollLoss {
  RollPipeline pipeline = RollPipeline::kTexts;
  RollActor actor = RollActor::kRlvr;
  /// Why this program cannot train it: messages with file and line.
  std::vector<std::string> refused{};

  std::optional<int64_t> max_steps{};  ///< of the pipeline
  int64_t rollout_batch_size = 128, answers_of_prompt = 1, ppo_epochs = 1;

  bool ipo = false;

  double clip = 0.2, clip_low = 0.2, clip_high = 0.2;
  bool has_clip_range = false, has_dual_clip = false, has_kl = false;
  double kl = 0;
  std::string aggregation = "seq-mean-token-mean";
  std::string variant{};                      ///< pg_variant of a class that reads it
  std::optional<std::string> answer_ratio{};  ///< place of "importance_sampling: seq"
  std::string estimator = "gae";              ///< adv_estimator
  std::vector<std::string> uneven{};          ///< keys by which an answer's tokens get different advantages or weights

  bool has_variants() const { return actor == RollActor::kRlvrVariants || actor == RollActor::kAgenticVariants; }
  bool is_rlvr() const { return actor == RollActor::kRlvr || actor == RollActor::kRlvrVariants; }
  bool is_agentic() const { return actor == RollActor::kAgentic || actor == RollActor::kAgenticVariants; }
  /// The value of --objective; empty: there is none here.
  std::string objective() const;
};

/// Sets pipeline and actor by the worker's class, else by its role, else by the pipeline's keys.
void find_roll_pipeline(const YAML::Node& root, const YamlValue& own, RollWorker& worker);

/// Sets --objective and its flags, and doubles the batch of pairs, as ROLL does; for the flags of the command line to
/// override.
void take_roll_loss(RollWorker& worker, Arguments& arguments);

/// True if the command line gives another --objective than the file's.
bool is_roll_loss_replaced(const RollWorker& worker, const Arguments& arguments);

/// Throws UsageErrors for a loss that this program does not have, unless it is replaced. Tells the flags of the loss.
void check_roll_loss(const RollWorker& worker, Arguments& arguments, const DiagnosticSink& sink);

/// Iterations of a training on answers or pairs that have no number in training_args; nullopt: epochs decide.
/// `of_epochs`: their iterations, counted if they are needed.
std::optional<int64_t> roll_pipeline_steps(const RollWorker& worker, int64_t global_batch,
                                           const std::function<int64_t()>& of_epochs, const DiagnosticSink& sink);

}  // namespace megashard
