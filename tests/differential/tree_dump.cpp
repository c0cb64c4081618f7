// tree_dump FIRST COUNT FILE: trains COUNT random trees under fully_shard, ranks as threads, and
// writes what they are and what came out, for tests/interop/test_random_trees.py to repeat with
// PyTorch.

#include <cstdlib>
#include <fstream>
#include <iostream>

#include "tests/differential/sharded_run.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

nlohmann::json values_of(const std::vector<at::Tensor>& tensors) {
  nlohmann::json all = nlohmann::json::array();
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      all.push_back(nullptr);
      continue;
    }
    const auto flat = tensor.contiguous();
    const auto* data = flat.const_data_ptr<float>();
    all.push_back(std::vector<float>(data, data + flat.numel()));
  }
  return all;
}

nlohmann::json dump(const TreeSpec& tree, const ExpectedRun& run) {
  nlohmann::json steps = nlohmann::json::array();
  for (const auto& step : run.steps) {
    steps.push_back(
        {{"losses", step.losses}, {"gradients", values_of(step.gradients)}, {"weights", values_of(step.weights)}});
  }
  return {{"tree", to_json(tree)},
          {"names", run.names},
          {"initial", values_of(run.initial)},
          {"inputs", values_of(run.inputs)},
          {"learning_rate", kLearningRate},
          {"steps", steps}};
}

void train(const TreeSpec& tree, const ExpectedRun& expected) {
  run_ranks(tree.world, [&](const ProcessGroupPtr& group) {
    const int shards = tree.world / tree.replicas;
    const auto mesh = tree.replicas == 1 ? std::make_shared<DeviceMesh>(group, std::vector<int>{tree.world})
                                         : std::make_shared<DeviceMesh>(group, std::vector<int>{tree.replicas, shards},
                                                                        std::vector<std::string>{"replicate", "shard"});
    run_sharded(tree, expected, mesh, group->rank());
  });
}

}  // namespace
}  // namespace megashard::testing

int main(int argc, char** argv) {
  using namespace megashard::testing;
  if (argc != 4) {
    std::cerr << "usage: tree_dump FIRST COUNT FILE\n";
    return 2;
  }
  nlohmann::json all = nlohmann::json::array();
  const int first = std::atoi(argv[1]), count = std::atoi(argv[2]);
  try {
    for (int seed = first; seed < first + count; ++seed) {
      const TreeSpec tree = random_tree(static_cast<uint64_t>(seed), /*portable=*/true);
      const ExpectedRun expected = run_unsharded(tree);
      train(tree, expected);
      all.push_back(dump(tree, expected));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  std::ofstream(argv[3]) << all;
  return 0;
}
