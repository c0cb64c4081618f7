#pragma once

#include <ATen/core/Tensor.h>
#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "framework/batch.h"
#include "framework/registry.h"

namespace megashard {

/// A number to log: sum / count over the micro batches and ranks of a step. Both are fp64 scalars without gradient.
struct MetricSum {
  std::string name;  ///< in the log line, --metrics-file and TensorBoard
  at::Tensor sum, count;
};

/// The loss of a micro batch: the sum of its terms (of tokens, rows or pairs), over this rank's rows of the sequences.
struct Loss {
  /// Fp32 with gradient: scalar, or [means] of a loss that adds several means, as count().
  at::Tensor sum;
  /// The first one is the loss; the same names in each step. Of several means the trainer computes the first one.
  std::vector<MetricSum> metrics;
};

/// Holds this rank's rows of a micro batch for a loss.
struct LossInputs {
  at::Tensor token_losses;  ///< [B, T] fp32, -log p(label)
  const Batch& batch;
  /// Mean of a tensor without gradient over all ranks. Collective.
  std::function<at::Tensor(const at::Tensor&)> mean_over_ranks;
  at::Tensor values{}, entropies{}, teacher_log_probs{};  ///< as ModelOutput's; those that Needs names
};

/// Says which inputs a loss takes besides the tokens' losses and columns, and from which models.
struct Needs {
  bool values = false;       ///< takes a model with a score head, which gives no token losses
  bool last_tokens = false;  ///< each sequence's last token is an input, too, and the one whose loss_mask is 1
  bool latents = false;      ///< takes a model of latents (MultiModalModule::latent_patches)
  Asked asked{};
};

/// The loss that training minimises: a function of the tokens' losses -log p(label) (torchtitan's and TRL's loss
/// functions).
/// The trainer divides the sum by count(), by micro batch or over the global batch (--calculate-per-token-loss), and
/// scales it (--initial-loss-scale): an objective knows neither.
class Objective {
 public:
  virtual ~Objective() = default;

  /// Columns that a batch needs besides tokens and labels.
  virtual std::vector<std::string> columns() const = 0;
  virtual Needs needs() const { return {}; }
  /// Completes a batch as the data loader makes it (noise of latents). Runs on the loader's thread.
  virtual void prepare(Batch& /*batch*/) const {}
  /// How many neighbouring sequences a term needs, which stay together: 2 for pairs.
  virtual int64_t rows_per_term() const { return 1; }
  /// Fp32: how many terms a micro batch with whole sequences has: a scalar, or [means].
  virtual at::Tensor count(const Batch& whole) const = 0;
  /// True: its mean is over the global batch, as --calculate-per-token-loss makes it for all.
  virtual bool is_over_global_batch() const { return false; }
  /// For a loss that is linear in the tokens' losses: the gradient of operator()'s sum, [B, T] fp32 of whole sequences.
  /// Models may then make the head's gradients in forward. Undefined for all others.
  virtual at::Tensor weights(const Batch& /*whole*/) const { return {}; }
  /// Adds up the terms of this rank's rows (Sequences adds up a cut sequence). Collective if ranks share sequences.
  virtual Loss operator()(const LossInputs& in) const = 0;
};

/// A value of --objective.
using ObjectiveKind = NamedKind<std::unique_ptr<Objective>>;

/// All of them, in the order of their names. Each one's file adds it by a RegisterObjective.
const std::vector<ObjectiveKind>& objectives();

/// The objective of --objective NAME with the values of its flags; flags that are missing have their initial value.
std::unique_ptr<Objective> make_objective(const std::string& name, const std::map<std::string, double>& options);

/// Versions that an objective is compiled against. The program ignores an objective whose stamp differs from its own.
struct ObjectiveStamp {
  uint32_t version = 2;  ///< changes with Objective and ObjectiveKind
  const char* libtorch = TORCH_VERSION;
  size_t inputs_bytes = sizeof(LossInputs);
  size_t batch_bytes = sizeof(Batch);
  size_t loss_bytes = sizeof(Loss);
};

/// A static object of an objective's file, which is part of the program or a library of --loss-plugin; makes
/// --objective and --help know it. Leave the default stamp.
struct RegisterObjective {
  explicit RegisterObjective(const ObjectiveKind& kind, const ObjectiveStamp& stamp = {});
};

/// Number of objectives that were ignored.
int64_t ignored_objectives();

inline constexpr const char* kNextToken = "next-token";
/// Column [B, T] float32: a reference model's log-probabilities of the labels.
inline constexpr const char* kRefLogProbs = "ref_log_probs";

}  // namespace megashard
