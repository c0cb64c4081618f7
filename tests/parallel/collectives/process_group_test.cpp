#include "parallel/collectives/process_group.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <future>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kByte};

// Values that differ by rank and index, and whose sums are inexact in fp32.
at::Tensor values(int rank, int64_t count, at::ScalarType dtype) {
  const at::Tensor whole = (at::arange(count, at::kFloat) * 7 + rank * 3).remainder(13);
  return (c10::isFloatingType(dtype) ? whole * 0.1 + 1e-3 * rank : whole).to(dtype);
}

// The interface's contract: rank order, 16-bit floats in fp32, one rounding.
at::Tensor expected_sum(int world, int64_t count, at::ScalarType dtype, bool average) {
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  const at::ScalarType accumulate = narrow ? at::kFloat : dtype;
  at::Tensor sum = values(0, count, dtype).to(accumulate);
  for (int rank = 1; rank < world; ++rank) sum = sum + values(rank, count, dtype).to(accumulate);
  return (average ? sum / world : sum).to(dtype);
}

/// Transport between ranks of one machine, for the groups of these tests.
enum class Way { kMemory, kGloo };

class SetWay {
 public:
  explicit SetWay(Way way) { setenv("MEGASHARD_HOST_MESSAGES", way == Way::kMemory ? "1" : "0", 1); }
  ~SetWay() { unsetenv("MEGASHARD_HOST_MESSAGES"); }
  SetWay(const SetWay&) = delete;
  SetWay& operator=(const SetWay&) = delete;
};

std::string name_of(Way way) { return way == Way::kMemory ? "memory" : "gloo"; }

class Collectives : public ::testing::TestWithParam<std::tuple<int, Way>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }

 private:
  SetWay way_{std::get<1>(GetParam())};
};
INSTANTIATE_TEST_SUITE_P(Worlds, Collectives,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Values(Way::kMemory, Way::kGloo)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "_" + name_of(std::get<1>(info.param));
                         });

class LostRanks : public ::testing::TestWithParam<Way> {
  SetWay way_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Ways, LostRanks, ::testing::Values(Way::kMemory, Way::kGloo),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(Collectives, GatherEveryDtypeAlsoInPlace) {
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const int64_t n : {0, 5, 70000}) {
        std::vector<at::Tensor> all;
        for (int rank = 0; rank < world_size; ++rank) all.push_back(values(rank, n, dtype));
        const at::Tensor expected = at::cat(all);
        const at::Tensor mine = values(world->rank(), n, dtype);

        const at::Tensor output = at::empty({world_size * n}, dtype);
        world->all_gather_into(output, mine).wait();
        EXPECT_TRUE(at::equal(output, expected)) << dtype << " x " << n;

        const at::Tensor in_place = at::full({world_size * n}, 9, dtype);
        const at::Tensor slice = in_place.narrow(0, world->rank() * n, n);
        slice.copy_(mine);
        world->all_gather_into(in_place, slice).wait();
        EXPECT_TRUE(at::equal(in_place, expected)) << dtype << " x " << n << " in place";
      }
    }
  });
}

TEST_P(Collectives, ReduceInRankOrder) {
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const int64_t n : {0, 3, 1500, 70001}) {  // both algorithms of all_reduce, whole blocks and remainders
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
          if (op == ReduceOp::kAvg && !c10::isFloatingType(dtype)) continue;
          const bool average = op == ReduceOp::kAvg;
          const at::Tensor expected = expected_sum(world_size, n * world_size, dtype, average);
          const at::Tensor input = values(world->rank(), n * world_size, dtype);
          const at::Tensor output = at::empty({n}, dtype);
          world->reduce_scatter_into(output, input, op).wait();
          EXPECT_TRUE(at::equal(output, expected.narrow(0, world->rank() * n, n))) << dtype << " x " << n;
          world->all_reduce(input, op).wait();
          EXPECT_TRUE(at::equal(input, expected)) << dtype << " x " << n << " all_reduce";
        }
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterAddsNarrowNumbersInSinglePrecision) {
  MEGASHARD_NOT_ON_SIM("NCCL adds numbers of one dtype");
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      constexpr int64_t n = 70001;  // more than one read
      at::Tensor wanted = values(0, n * world_size, dtype).to(at::kFloat);
      for (int rank = 1; rank < world_size; ++rank) wanted += values(rank, n * world_size, dtype).to(at::kFloat);
      const at::Tensor output = at::empty({n}, at::kFloat);
      world->reduce_scatter_into(output, values(world->rank(), n * world_size, dtype), ReduceOp::kSum).wait();
      EXPECT_TRUE(at::equal(output, wanted.narrow(0, world->rank() * n, n))) << dtype;
    }
  });
}

TEST_P(Collectives, MaxAndMinHandOnNan) {
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    const auto reduce = [&](ReduceOp op) {
      at::Tensor tensor = at::full({3}, static_cast<double>(world->rank()), at::kFloat);
      if (world->rank() == 0) tensor[1] = std::numeric_limits<float>::quiet_NaN();
      if (world->rank() == world_size - 1) tensor[2] = std::numeric_limits<float>::quiet_NaN();
      world->all_reduce(tensor, op).wait();
      EXPECT_TRUE(tensor.slice(0, 1).isnan().all().item<bool>());
      return tensor[0].item<float>();
    };
    EXPECT_EQ(reduce(ReduceOp::kMax), world_size - 1);
    EXPECT_EQ(reduce(ReduceOp::kMin), 0);
  });
}

TEST_P(Collectives, BroadcastFromEveryRootAndAllToAll) {
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    for (int root = 0; root < world_size; ++root) {
      const at::Tensor tensor = values(world->rank(), 1000, at::kFloat);
      world->broadcast(tensor, root).wait();
      EXPECT_TRUE(at::equal(tensor, values(root, 1000, at::kFloat))) << "root " << root;
    }
    // Element i of rank r's input is 10 r + i; rank r gets element r of every rank.
    const at::Tensor input = at::arange(world_size, at::kLong) + 10 * world->rank();
    const at::Tensor output = at::empty({world_size}, at::kLong);
    world->all_to_all_into(output, input).wait();
    EXPECT_TRUE(at::equal(output, at::arange(world_size, at::kLong) * 10 + world->rank()));
  });
}

TEST_P(Collectives, AllToAllOfUnequalSlices) {
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    const auto count = [](int from, int to) { return 1000 * ((from + 2 * to) % 3); };  // some send nothing
    Splits splits;
    std::vector<at::Tensor> sent, expected;
    for (int other = 0; other < world_size; ++other) {
      splits.input.push_back(count(world->rank(), other));
      splits.output.push_back(count(other, world->rank()));
      sent.push_back(at::full({splits.input.back()}, 10 * world->rank() + other, at::kFloat));
      expected.push_back(at::full({splits.output.back()}, 10 * other + world->rank(), at::kFloat));
    }
    const at::Tensor wanted = at::cat(expected), output = at::empty_like(wanted);
    world->all_to_all_into(output, at::cat(sent), splits).wait();
    EXPECT_TRUE(at::equal(output, wanted));
    splits.input.front() += 1;
    EXPECT_THAT(message_of([&] { world->all_to_all_into(output, at::cat(sent), splits); }),
                HasSubstr("are not those of an input of"));
  });
}

TEST_P(Collectives, ShiftGoesRoundTheRing) {
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    for (const int distance : {1, 2, -1, 0}) {
      for (const int64_t n : {0, 5, 70000}) {
        const at::Tensor output = at::empty({n}, at::kBFloat16);
        world->shift_into(output, values(world->rank(), n, at::kBFloat16), distance).wait();
        const int source = ((world->rank() - distance) % world_size + world_size) % world_size;
        EXPECT_TRUE(at::equal(output, values(source, n, at::kBFloat16))) << distance << " ranks on, x " << n;
      }
    }
  });
}

TEST_P(Collectives, GatherStringsOfAnyLength) {
  const int world_size = ranks();
  run_ranks(world_size, [&](const ProcessGroupPtr& world) {
    const auto text = [](int rank) {
      return std::string(static_cast<size_t>(rank) * 1000, 'x') + std::string(1, '\0');
    };
    const std::vector<std::string> all = world->all_gather_strings(text(world->rank()));
    ASSERT_EQ(all.size(), static_cast<size_t>(world_size));
    for (int rank = 0; rank < world_size; ++rank) EXPECT_EQ(all[static_cast<size_t>(rank)], text(rank));
    for (const std::string& empty : world->all_gather_strings("")) EXPECT_EQ(empty, "");
  });
}

TEST(ProcessGroup, ReduceScatterDoesNotDependOnTheGrouping) {
  run_ranks(3, [](const ProcessGroupPtr& world) {
    const int64_t n = 5000;
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor rows = values(world->rank(), 3 * n, dtype).view({3, n});
      const at::Tensor whole = at::empty({n}, dtype);
      world->reduce_scatter_into(whole, rows.clone(), ReduceOp::kAvg).wait();
      int64_t begin = 0;
      for (const int64_t part : {1, 1023, 2976, 1000}) {
        const at::Tensor output = at::empty({part}, dtype);
        world->reduce_scatter_into(output, rows.narrow(1, begin, part).contiguous(), ReduceOp::kAvg).wait();
        EXPECT_TRUE(at::equal(output, whole.narrow(0, begin, part)));
        begin += part;
      }
      EXPECT_EQ(begin, n);
    }
  });
}

TEST(ProcessGroup, SeveralCollectivesAtATime) {
  MEGASHARD_NOT_ON_SIM("its collectives are over when the call returns");
  run_ranks(3, [](const ProcessGroupPtr& world) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor gathered = at::empty({3 * 50000}, at::kFloat);
      const at::Tensor scattered = at::empty({50000}, at::kFloat);
      const at::Tensor small = values(world->rank(), 10, at::kFloat);
      const at::Tensor large = values(world->rank(), 100000, at::kFloat);
      Work gather = world->all_gather_into(gathered, values(world->rank(), 50000, at::kFloat));
      Work scatter = world->reduce_scatter_into(scattered, values(world->rank(), 150000, at::kFloat), ReduceOp::kSum);
      Work first = world->all_reduce(small, ReduceOp::kSum);
      Work second = world->all_reduce(large, ReduceOp::kSum);
      EXPECT_TRUE(gather.pending());
      Work copy = first;
      first.wait();
      copy.wait();  // a second wait does nothing
      scatter.wait();
      second.wait();
      gather.wait();
      EXPECT_FALSE(gather.pending());
      EXPECT_TRUE(at::equal(gathered.narrow(0, 100000, 50000), values(2, 50000, at::kFloat)));
      EXPECT_TRUE(
          at::equal(scattered, expected_sum(3, 150000, at::kFloat, false).narrow(0, world->rank() * 50000, 50000)));
      EXPECT_TRUE(at::equal(small, expected_sum(3, 10, at::kFloat, false)));
      EXPECT_TRUE(at::equal(large, expected_sum(3, 100000, at::kFloat, false)));
    }
  });
}

TEST(ProcessGroup, SubgroupsAndTheirSubgroups) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const bool odd = world->rank() % 2 == 1;
    const ProcessGroupPtr half = world->subgroup(odd ? std::vector{1, 3} : std::vector{0, 2}, "by parity");
    EXPECT_EQ(half->rank(), world->rank() / 2);
    EXPECT_EQ(half->ranks(), odd ? (std::vector{1, 3}) : (std::vector{0, 2}));
    const at::Tensor tensor = at::full({2}, static_cast<double>(world->rank()), at::kFloat);
    half->all_reduce(tensor, ReduceOp::kSum).wait();
    EXPECT_EQ(tensor[0].item<float>(), odd ? 4 : 2);
    const ProcessGroupPtr alone = half->subgroup({half->rank()}, "alone");
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->ranks(), std::vector{world->rank()});
    world->barrier();
  });
}

TEST(ProcessGroup, WrongArgumentsAreNamed) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const at::Tensor four = at::empty({4}, at::kFloat);
    const at::Tensor table = at::empty({2, 2}, at::kFloat);
    const at::Tensor whole = at::empty({2}, at::kLong);
    EXPECT_THAT(message_of([&] { world->all_gather_into(four, four); }),
                HasSubstr("all_gather of group 'world' over 2 ranks cannot take an input of 4 "
                          "elements to an output of 4"));
    EXPECT_THAT(message_of([&] { world->reduce_scatter_into(whole, four, ReduceOp::kSum); }),
                AllOf(HasSubstr("one dtype"), HasSubstr("Long"), HasSubstr("Float")));
    EXPECT_THAT(message_of([&] { world->all_reduce(table.t(), ReduceOp::kSum); }), HasSubstr("call contiguous()"));
    EXPECT_THAT(message_of([&] { world->all_reduce(whole, ReduceOp::kAvg); }), HasSubstr("sum and divide instead"));
    EXPECT_THAT(message_of([&] { world->broadcast(four, 2); }), HasSubstr("root 2 is no rank of this group of 2"));
    EXPECT_THAT(message_of([&] { world->shift_into(four, four.narrow(0, 0, 2), 1); }),
                HasSubstr("shift of group 'world' over 2 ranks cannot take an input of 2 elements to an output of 4"));
    EXPECT_THAT(message_of([&] { world->subgroup({1, 0}, "s"); }), HasSubstr("ascending"));
    EXPECT_THAT(message_of([&] { world->subgroup({1 - world->rank()}, "s"); }),
                HasSubstr("only members make a subgroup"));
  });
}

TEST_P(LostRanks, RankThatMakesNoCallEndsTheWaitAtTheDeadline) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  const std::string message = message_of([] {
    run_ranks(
        2,
        [](const ProcessGroupPtr& world) {
          if (world->rank() == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(3000));
          const at::Tensor tensor = at::empty({2}, at::kFloat);
          world->all_gather_into(tensor, at::empty({1}, at::kFloat)).wait();
        },
        std::chrono::milliseconds(1000));
  });
  EXPECT_THAT(message, AllOf(HasSubstr("rank 0: all_gather in group 'world' failed on rank 0 after waiting 1."),
                             HasSubstr(" s for rank 1: a rank died or ran a different number of collectives, or it "
                                       "needs longer (raise --distributed-timeout-minutes)")));
}

TEST_P(LostRanks, RankThatDiesEndsMessagesThatHaveBegun) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  constexpr int64_t kBytes = 256 << 20;  // takes far longer than the other rank lives
  std::string message;
  std::promise<void> posted;
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    const at::Tensor whole = at::empty({2 * kBytes}, at::kByte);
    Work work = world->all_gather_into(whole, at::empty({kBytes}, at::kByte));
    if (world->rank() == 1) {
      posted.get_future().wait();
      return std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    posted.set_value();
    message = message_of([&] { work.wait(); });
  });
  EXPECT_THAT(message,
              AllOf(HasSubstr("all_gather in group 'world' failed on rank 0 after"), Not(HasSubstr("Timed out"))));
}

TEST(ProcessGroup, RankThatDiesEndsTheMakingOfAGroup) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  std::string message;
  run_ranks(3, [&](const ProcessGroupPtr& world) {
    if (world->rank() == 1) return;
    if (world->rank() == 0) {
      message = message_of([&] { world->subgroup({0, 1, 2}, "all"); });
    } else {
      EXPECT_THAT(message_of([&] { world->subgroup({0, 1, 2}, "all"); }), HasSubstr("group 'all'"));
    }
  });
  EXPECT_THAT(message, AllOf(HasSubstr("connecting to the other ranks in group 'all' failed"), HasSubstr("by peer")));
}

TEST_P(LostRanks, ARankThatIsNotWaitedForYetEndsTheWaitToo) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  std::string message;
  run_ranks(3, [&](const ProcessGroupPtr& world) {
    if (world->rank() == 2) return std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const at::Tensor whole = at::empty({3}, at::kByte);
    const at::Tensor mine = at::empty({1}, at::kByte);
    if (world->rank() == 1) return std::this_thread::sleep_for(std::chrono::seconds(2));  // awaited first
    message = message_of([&] { world->all_gather_into(whole, mine).wait(); });
  });
  EXPECT_THAT(message, HasSubstr("s for rank 2: a rank died"));
}

TEST(ProcessGroup, FailureOfOneRankEndsTheOthersAtOnce) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  const auto started = std::chrono::steady_clock::now();
  const std::string message = message_of([] {
    run_ranks(3, [](const ProcessGroupPtr& world) {
      TORCH_CHECK(world->rank() != 1, "this one fails");
      world->barrier();
      world->barrier();
    });
  });
  EXPECT_EQ(message, "rank 1: this one fails");
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(10));
}

}  // namespace
}  // namespace megashard
