// State dicts of FSDP over tensor-parallel layers. Names are those of PyTorch's tests.

#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensor_parallel_model.h"

namespace megashard::testing {
namespace {

struct Shape {
  std::vector<int> mesh;  // [shard, tp], or [replicate, shard, tp]
  int ranks() const {
    int product = 1;
    for (const int extent : mesh) product *= extent;
    return product;
  }
};

using Model = ParallelStack<ParallelMlp>;

/// A model over `shape`. Four FSDP ranks of two tensor-parallel ranks share 10 hidden features as 2, 2, 1 and 0.
std::unique_ptr<Model> model_over(const ProcessGroupPtr& world, const Shape& shape) {
  std::vector<std::string> names{"shard", "tp"}, fsdp{"shard"};
  if (shape.mesh.size() == 3) {
    names.insert(names.begin(), "replicate");
    fsdp.insert(fsdp.begin(), "replicate");
  }
  const auto mesh = std::make_shared<DeviceMesh>(world, shape.mesh, names);
  auto model = std::make_unique<Model>(6, 10, mesh->submesh({"tp"}));
  shard_units(*model, {.mesh = mesh->submesh(fsdp)});
  return model;
}

ShardedTensors tensors_of(Model& model) {
  ShardedTensors tensors;
  for (const auto& item : model.named_parameters())
    tensors.emplace_back("model." + item.key(), reshard_and_view(item.value()));
  return tensors;
}

void expect_filled(Model& model, uint64_t seed, const std::string& what) {
  for (const auto& item : model.named_parameters()) {
    const at::Tensor whole = fixed(global_sizes(item.value()), seed++) * 0.5;
    EXPECT_TRUE(at::equal(reshard_and_view(item.value()).local, part_like(whole, item.value())))
        << item.key() << " " << what;
  }
}

void save_and_load(const Shape& saved, const std::vector<Shape>& loaded) {
  TemporaryFolder folder;
  run_ranks(saved.ranks(), [&](const ProcessGroupPtr& world) {
    const auto model = model_over(world, saved);
    fill_whole(*model, 11);
    save_checkpoint(folder.path(), 1, tensors_of(*model), {}, world);
  });
  for (const Shape& shape : loaded) {
    run_ranks(shape.ranks(), [&](const ProcessGroupPtr& world) {
      const auto model = model_over(world, shape);
      load_checkpoint(folder.path(), tensors_of(*model), world);
      expect_filled(*model, 11, c10::str("at ", at::ArrayRef<int>(shape.mesh)));
    });
  }
}

TEST(FullyShardStateDict, test_2d_state_dict_correctness) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto model = model_over(world, {{2, 2}});
    fill_whole(*model, 11);
    Model plain(6, 10, mesh_of_one());
    fill_whole(plain, 11);
    const auto expected = plain.named_parameters();
    const auto tensors = tensors_of(*model);
    ASSERT_EQ(tensors.size(), expected.size());
    for (const auto& [key, tensor] : tensors) {
      const auto& whole = expected[key.substr(6)];
      EXPECT_EQ(at::IntArrayRef(tensor.global_sizes), whole.sizes()) << key;
      EXPECT_TRUE(at::equal(assembled(tensor, *world), whole)) << key;
    }
  });
}

TEST(FullyShardStateDict, test_dp_tp_state_dict_save_load) {
  save_and_load({{2, 2}}, {{{1, 2}}, {{4, 1}}, {{1, 1}}});
  save_and_load({{4, 2}}, {{{2, 2}}});  // with ranks that have no rows
  save_and_load({{3, 1}}, {{{4, 2}}});
}

TEST(FullyShardStateDict, test_hsdp_tp_state_dict_save_load) {
  save_and_load({{2, 2, 2}}, {{{1, 2}}, {{2, 1, 1}}});
  save_and_load({{2, 1}}, {{{2, 2, 2}}});
}

}  // namespace
}  // namespace megashard::testing
