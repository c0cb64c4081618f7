#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tests/differential/tree_spec.h"

namespace megashard::testing {

/// What a tree's training gives without sharding: every rank's whole gradients, reduced in rank
/// order by plain loops, and stepped by SGD.
struct ExpectedStep {
  std::vector<std::vector<float>> losses;  // [microbatch][rank]
  std::vector<at::Tensor> gradients;       // by weight, whole, in fp32; undefined: none
  std::vector<at::Tensor> weights;         // after the step
};
struct ExpectedRun {
  std::vector<std::string> names;  // of the weights
  std::vector<at::Tensor> initial;
  std::vector<at::Tensor> inputs;  // of each step, microbatch and rank, in that order
  std::vector<ExpectedStep> steps;
};

constexpr double kLearningRate = 0.05;

ExpectedRun run_unsharded(const TreeSpec& tree);

/// Whether this microbatch reduces, and whether it also all-reduces across replicas.
struct Sync {
  bool reduces;
  bool all_reduces;
};
Sync sync_of(const TreeSpec& tree, int microbatch);

}  // namespace megashard::testing
