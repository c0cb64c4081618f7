#pragma once

#include <ATen/TensorOperators.h>

#include <string>
#include <utility>
#include <vector>

#include "framework/objectives/objectives.h"
#include "framework/objectives/sequences.h"

namespace megashard {

/// Holds a number for each chosen answer, and for each rejected one.
struct Pairs {
  at::Tensor chosen, rejected;  ///< [pairs] each

  at::Tensor difference() const { return chosen - rejected; }
};

/// The numbers of sequences that alternate: a chosen answer, then the rejected one.
Pairs in_pairs(const at::Tensor& of_sequences);

/// A loss of pairs of answers to a prompt. Sequences alternate: a chosen answer, then the rejected one; loss_mask marks
/// the answers. Some add the mean loss of the chosen answers' tokens.
class PreferenceObjective : public Objective {
 public:
  /// `added`: the coefficient of the chosen answers' mean token loss; 0: without. `of_texts`: that mean is over the
  /// whole texts, prompts included.
  PreferenceObjective(std::string name, double added, bool of_texts = false)
      : name_(std::move(name)), added_(added), of_texts_(of_texts) {}

  std::vector<std::string> columns() const override { return {kLossMask, kLabelCounts}; }
  int64_t rows_per_term() const override { return 2; }
  at::Tensor count(const Batch& whole) const override;
  Loss operator()(const LossInputs& in) const override;

 protected:
  struct Terms {
    at::Tensor losses;  ///< [pairs]
    Pairs rewards;      ///< for the log: TRL's rewards/chosen, rewards/rejected
  };
  virtual Terms terms(const LossInputs& in, const Sequences& sequences) const = 0;

  /// Sums x [B, T] over the tokens of the answers.
  static Pairs sums(const at::Tensor& x, const LossInputs& in, const Sequences& sequences);
  /// Divides sums by the answers' numbers of tokens.
  static Pairs means(const Pairs& sums, const Sequences& sequences);

 private:
  /// 1 for tokens that are counted in the chosen answers' mean: [B, T].
  at::Tensor tokens_of_chosen(const Batch& batch) const;

  std::string name_;
  double added_;
  bool of_texts_;
};

/// Scalar fp32: the number of pairs of whole sequences.
at::Tensor pair_count(const Batch& whole);

/// Logs the mean of `each`.
MetricSum mean_metric(std::string name, const at::Tensor& each);

}  // namespace megashard
