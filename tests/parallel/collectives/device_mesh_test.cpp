#include "parallel/collectives/device_mesh.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "parallel/collectives/fake_process_group.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_fake_ranks;
using testing::run_ranks;

TEST(DeviceMesh, RowMajorReplicasOfConsecutiveShards) {
  run_fake_ranks(6, [](const ProcessGroupPtr& world) {
    const DeviceMesh mesh(world, {2, 3}, {"Replicate", "Shard"});
    const int row = world->rank() / 3;
    const int column = world->rank() % 3;
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.size(), 6);
    EXPECT_EQ(mesh.coordinate(0), row);
    EXPECT_EQ(mesh.coordinate(1), column);
    EXPECT_EQ(mesh.group("Replicate")->ranks(), (std::vector{column, column + 3}));
    EXPECT_EQ(mesh.group("Shard")->ranks(), (std::vector{3 * row, 3 * row + 1, 3 * row + 2}));
    EXPECT_EQ(mesh.describe(), "(Replicate=2, Shard=3)");
    EXPECT_EQ(mesh.device().type(), testing::device_of_tests().type());
  });
}

TEST(DeviceMesh, ItsDeviceIsThatOfItsRanksWhoeverAsks) {
  if (!testing::on_simulated_device()) GTEST_SKIP() << "a CPU is everybody's";
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const DeviceMesh mesh(world, {2});
    const c10::Device mine(c10::kCUDA, static_cast<c10::DeviceIndex>(world->rank()));
    EXPECT_EQ(mesh.device(), mine);
    std::thread([&] { EXPECT_EQ(mesh.device(), mine); }).join();  // a thread whose current device is the first
  });
}

TEST(DeviceMesh, ThreeDimensionsOfAWorldOf24) {
  const ProcessGroupPtr world = make_fake_group({.rank = 17, .world_size = 24});
  const DeviceMesh mesh(world, {2, 3, 4}, {"a", "b", "c"});  // 17 = 1 * 12 + 1 * 4 + 1
  EXPECT_EQ(mesh.group("a")->ranks(), (std::vector{5, 17}));
  EXPECT_EQ(mesh.group("b")->ranks(), (std::vector{13, 17, 21}));
  EXPECT_EQ(mesh.group("c")->ranks(), (std::vector{16, 17, 18, 19}));
}

TEST(DeviceMesh, ASubmeshHasTheGroupsOfTheDimensionsItNames) {
  const ProcessGroupPtr world = make_fake_group({.rank = 5, .world_size = 8});
  const DeviceMesh mesh(world, {2, 2, 2}, {"replicate", "shard", "tp"});
  const auto fsdp = mesh.submesh({"replicate", "shard"});
  EXPECT_EQ(fsdp->describe(), "(replicate=2, shard=2)");
  EXPECT_EQ(fsdp->group(1), mesh.group("shard"));
  EXPECT_EQ(fsdp->coordinate(0), 1);
  EXPECT_EQ(fsdp->coordinate(1), 0);
  EXPECT_EQ(mesh.submesh({"tp"})->group(0)->ranks(), (std::vector{4, 5}));
}

TEST(DeviceMesh, ADimensionOfAllRanksIsTheGroupItself) {
  const ProcessGroupPtr world = make_fake_group({.rank = 1, .world_size = 4});
  EXPECT_EQ(DeviceMesh(world, {4}).group(0), world);
  EXPECT_EQ(DeviceMesh(world, {4}).describe(), "(4)");
  const DeviceMesh replicas(world, {4, 1}, {"Replicate", "Shard"});
  EXPECT_EQ(replicas.group(0), world);
  EXPECT_EQ(replicas.size(1), 1);
}

TEST(DeviceMesh, GroupsOfTwoMeshesOfOneNameDoNotMeet) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const DeviceMesh first(world, {2, 2}, {"Replicate", "Shard"});
    const DeviceMesh second(world, {2, 2}, {"Replicate", "Shard"});
    for (const DeviceMesh* mesh : {&second, &first}) {
      const at::Tensor rows = at::full({1}, static_cast<double>(world->rank()), at::kFloat);
      mesh->group("Shard")->all_reduce(rows, ReduceOp::kSum).wait();
      EXPECT_EQ(rows.item<float>(), world->rank() < 2 ? 1 : 5);
      mesh->group("Replicate")->all_reduce(rows, ReduceOp::kSum).wait();
      EXPECT_EQ(rows.item<float>(), 6);
    }
  });
}

TEST(DeviceMesh, SeveralDimensionsCanBeOneGroup) {
  for (const int rank : {0, 13, 23}) {
    const ProcessGroupPtr world = make_fake_group({.rank = rank, .world_size = 24});
    const DeviceMesh mesh(world, {2, 3, 4}, {"dp", "cp", "tp"});
    const int dp = rank / 12, cp = rank / 4 % 3, tp = rank % 4;
    std::vector<int> dp_cp, dp_tp;
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 3; ++j) dp_cp.push_back(i * 12 + j * 4 + tp);
      for (int j = 0; j < 4; ++j) dp_tp.push_back(i * 12 + cp * 4 + j);
    }
    EXPECT_EQ(mesh.flatten({"dp", "cp"})->ranks(), dp_cp);
    EXPECT_EQ(mesh.flatten({"dp", "cp"}), mesh.flatten({"dp", "cp"}));
    EXPECT_EQ(mesh.flatten({"tp", "dp"})->ranks(), dp_tp);
    EXPECT_EQ(mesh.flatten({"dp", "cp", "tp"})->size(), 24);
    EXPECT_EQ(mesh.flatten({"cp"}), mesh.group("cp"));
    EXPECT_EQ(mesh.flatten({})->ranks(), std::vector{dp * 12 + cp * 4 + tp});
    EXPECT_THAT(message_of([&] {
                  mesh.submesh({"dp", "cp"})->flatten({"dp", "cp"});
                }),
                HasSubstr("was made from existing groups"));
  }
}

TEST(DeviceMesh, WrongShapesAndNamesAreNamed) {
  const ProcessGroupPtr world = make_fake_group({.rank = 0, .world_size = 6});
  EXPECT_THAT(message_of([&] { DeviceMesh(world, {2, 2}, {"a", "b"}); }), HasSubstr("the product must be 6"));
  EXPECT_THAT(message_of([&] { DeviceMesh(world, {-2, -3}, {"a", "b"}); }), HasSubstr("the product must be 6"));
  EXPECT_THAT(message_of([&] { DeviceMesh(world, {2, 3}); }), HasSubstr("2 dimensions need as many names, got 0"));
  EXPECT_THAT(message_of([&] { DeviceMesh(world, {2, 3}, {"a", "a"}); }), HasSubstr("two dimensions are named 'a'"));
  EXPECT_THAT(message_of([&] {
                DeviceMesh(world, {2, 3}, {"a", "b"}).group("c");
              }),
              HasSubstr("(a=2, b=3) has no dimension 'c'"));
}

}  // namespace
}  // namespace megashard
