#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "framework/training/inference.h"

namespace megashard {

/// The texts as rows of one tensor, filled up with token 0; one row of it when there are none, so that a rank without
/// texts runs the same gathers.
at::Tensor padded_texts(const TokenLists& texts, int64_t length);
/// [texts], or [1] with a 1 when there are none.
at::Tensor text_lengths(const TokenLists& texts);

/// The length with which the ranks take so many tokens: some of them want a multiple. No token sees what is filled up
/// behind it.
int64_t length_for(int64_t tokens, const InferenceRanks& ranks);

/// The batch of these rows, on the device. `used`: the tokens of the longest text. What is filled up behind them has
/// the last one's position, since a model's positions may turn by the sequence's length.
Batch input_of_rows(const MultiModalModule& model, const at::Tensor& rows, int64_t used, Batch items,
                    const InferenceRanks& ranks);

}  // namespace megashard
