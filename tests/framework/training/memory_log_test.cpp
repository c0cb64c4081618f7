#include "framework/training/memory_log.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

constexpr int64_t kMib = 1 << 20;

TEST(MemoryLog, SaysWhatThePeakWasMadeOf) {
  const auto device = testing::device_of_tests();
  torch::nn::Module model;
  const auto weight = model.register_parameter("weight", at::ones({kMib / 4}, at::TensorOptions(device)));
  auto optimizer = make_optimizer({{"weight", weight}}, {});
  int64_t live = 0, peak = 10 * kMib;
  MemoryLog log(model, *optimizer, device, {.live_bytes = [&] { return live; }, .peak_bytes = [&] { return peak; }});
  const auto take = [&](MemoryClass of, int64_t bytes) {
    return counted_memory(of, c10::GetAllocator(device.type())->allocate(static_cast<size_t>(bytes)),
                          static_cast<size_t>(bytes));
  };
  weight.mutable_grad() = at::ones({kMib / 4}, at::TensorOptions(device));
  {
    const auto gathered = take(MemoryClass::kUnsharded, 2 * kMib);
    live = 8 * kMib;
    const auto buffer = take(MemoryClass::kCommunication, kMib / 2);
  }
  live = 7 * kMib;
  const auto later = take(MemoryClass::kUnsharded, kMib);  // less is there
  const std::string wanted = "memory (MiB) | peak: 10.0 | sharded parameters: 1.0 | gradients: 1.0 | optimizer state: "
                             "2.0 | unsharded parameters: 2.0 | communication buffers: 0.5 | activations and the rest: "
                             "3.5";
  EXPECT_EQ(memory_line(log.grown(1).value()), "[Rank 0] (after 1 iterations) " + wanted);
  peak += kMib / 20;
  EXPECT_FALSE(log.grown(2)) << "half a per cent";
  peak += kMib;
  live = 9 * kMib;
  const auto most = take(MemoryClass::kUnsharded, kMib);
  EXPECT_NE(memory_line(log.grown(3).value()).find("unsharded parameters: 2.0 | communication buffers: 0.0"),
            std::string::npos);
}

}  // namespace
}  // namespace megashard
