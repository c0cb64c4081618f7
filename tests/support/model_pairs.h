// A plain and a sharded model with the same weights, and training steps of both.
#pragma once

#include <gtest/gtest.h>

#include "tests/support/chain.h"
#include "tests/support/parity.h"
#include "tests/support/small_model.h"

namespace megashard::testing {

/// Blocks and a head, plain and sharded, with the same weights.
struct Stacks {
  Stacks(int depth, int64_t width, int64_t hidden) : plain(depth, width, hidden), model(depth, width, hidden) {
    fill_weights(plain);
    copy_weights(plain, model);
  }
  StackImpl plain;
  Stack model;
};

inline at::Tensor input_of(uint64_t step, const ProcessGroup& world) {
  return fixed({4, 6}, data_seed(step, world)) * 0.3;
}

/// Trains the plain and the sharded chain for some steps; compares them bit for bit or within `tolerance`.
inline void expect_chain_parity(Chain& plain, Chain& chain, ProcessGroup& world, double tolerance = 0) {
  for (uint64_t step = 0; step < 3; ++step) {
    plain.root.zero_grad();
    chain.root.zero_grad();
    const at::Tensor expected = plain.root.forward(input_of(step, world)).sum();
    const at::Tensor loss = chain.root.forward(input_of(step, world)).sum();
    if (tolerance == 0 || step == 0) {
      ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
    }
    expected.backward();
    loss.backward();
    average_gradients(plain.root, world);
    expect_gradients_of(plain.root, chain.root, tolerance);
    expect_sharded(chain.root);
    descend(plain.root, 1e-3);
    descend(chain.root, 1e-3);
  }
}

}  // namespace megashard::testing
