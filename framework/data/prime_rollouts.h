#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "framework/data/sample_dataset.h"

namespace megashard {

/// A rank's micro batches of a step, as prime-rl's orchestrator writes them (rollouts/step_N/rank_R.bin): msgpack of an
/// array of MicroBatch structs, each an array of its fields in their order. A sample is one micro batch: a row of
/// packed answers. The constructor checks sizes and throws an error with the file and the remedy.
///
/// collate() takes one sample and gives, besides tokens, labels, loss_mask, position_ids and document_lengths, the
/// columns of objective prime-rl: advantages, infer_logprobs and, where the file has them, ref_log_probs, rl_weights,
/// ce_weights and ref_kl_weights. All are shifted like labels. The column temperatures, by which a position's logits
/// are divided, is not, and is left out if all are 1.
class PrimeRollouts : public SampleDataset {
 public:
  explicit PrimeRollouts(std::string path);

  int64_t size() const override { return std::ssize(micro_batches_); }
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const override;
  const std::string& source_of(int64_t /*index*/) const override { return path_; }
  void add_facts(int64_t samples, DatasetFacts& facts) const override;

  /// Fields of a MicroBatch, in prime-rl's order.
  enum Field {
    kInputIds,
    kLossMaskField,
    kAdvantages,
    kInferenceLogprobs,
    kPositions,
    kSequenceLengths,
    kTemperatures,
    kEnvNames,
    kSeqLens,
    kRefLogprobs,
    kRoutedExperts,
    kMmKwargs,
    kMmTokenTypeIds,
    kRlWeights,
    kCeWeights,
    kRefKlWeights,
    kFields
  };
  /// The numbers of each field; empty: absent.
  using MicroBatch = std::array<std::vector<double>, kFields>;

 private:
  void check(const MicroBatch& each, size_t index) const;

  std::string path_;
  std::vector<MicroBatch> micro_batches_;
};

}  // namespace megashard
