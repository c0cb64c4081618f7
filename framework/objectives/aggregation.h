#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "framework/objectives/objectives.h"
#include "framework/objectives/sequences.h"

namespace megashard {

/// How the losses of tokens become one number (loss_agg_mode of verl and ROLL), over the global batch: a mean of
/// tokens; or a mean over the sequences of their tokens' sum, mean, or sum divided by a length. Sequences without a
/// label do not count.
enum class Aggregation { kTokenMean, kSeqMeanTokenSum, kSeqMeanTokenMean, kSeqMeanTokenSumNorm };
/// Their names, in this order.
const std::vector<std::string>& aggregation_names();

/// Scalar fp32: what the sum of all terms is divided by. Of whole sequences.
at::Tensor aggregation_count(Aggregation mode, const Batch& whole);

/// [B, T] fp32: what each token's loss is multiplied by, 0 where loss_mask is. `length`: kSeqMeanTokenSumNorm's; 0:
/// the batch's T.
at::Tensor aggregation_weights(Aggregation mode, const Batch& batch, double length);

/// The loss of the tokens' losses [B, T] of a micro batch, and its metric. Where loss_mask is 0, `losses` may hold
/// anything.
Loss aggregated_loss(std::string name, Aggregation mode, double length, const at::Tensor& losses, const Batch& batch);

}  // namespace megashard
