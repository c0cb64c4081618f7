#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "framework/modules/multi_modal_module.h"

namespace megashard {

using TokenLists = std::vector<std::vector<int64_t>>;

/// Log-probability of each token given those before it: [texts, length] fp32 on the CPU, row i
/// holding those of texts[i][1], texts[i][2], ... and then zeros. Each text has 1 to length + 1
/// tokens; an empty list gives no rows. One forward, without gradients: of a sharded model every
/// rank calls it equally often, an empty one too. `extra` is ModelInput's, on the host: the texts'
/// pictures, in their order.
at::Tensor log_probabilities(MultiModalModule& model, const TokenLists& texts, int64_t length,
                             c10::Device device, std::map<std::string, at::Tensor> extra = {});

/// The `count` tokens that follow each text, the likeliest one each time: [texts, count] int64 on
/// the CPU. Behind `end` (not below 0) a row repeats it. Exactly `count` forwards, for texts of any
/// length: of a sharded model every rank calls it with the same count, an empty list too.
at::Tensor greedy_continuations(MultiModalModule& model, const TokenLists& texts, int64_t count,
                                int64_t end, c10::Device device);

}  // namespace megashard
