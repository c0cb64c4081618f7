#include "tests/support/simulated_device.h"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tests/support/default_device.h"

namespace megashard::testing {
namespace {

/// Fails each test in which the device found an error. At the end it prints how much was checked.
class FindingsListener final : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override {
    for (const std::string& finding : simulated_cuda().take_findings()) ADD_FAILURE() << finding;
  }
  void OnTestStart(const ::testing::TestInfo&) override { simulated_cuda().take_findings(); }
  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    const sim::Counts counts = simulated_device().counts();
    std::printf("simulated device: %lld operations checked, %lld windows run in another order (seed "
                "%llu)\n",
                static_cast<long long>(counts.operations), static_cast<long long>(counts.shuffled_windows),
                static_cast<unsigned long long>(simulated_device().settings().shuffle_seed));
  }
};

}  // namespace

bool on_simulated_device() {
  static const bool result = [] {
    const char* device = std::getenv("MEGASHARD_TEST_DEVICE");
    return device != nullptr && std::string_view(device) == "sim";
  }();
  return result;
}

const CudaModule& simulated_cuda() {
  static const CudaModule module = load_cuda_module();
  return module;
}

const sim::SimModule& simulated_device() {
  static const sim::SimModule module = [] {
    sim::SimModule loaded{};
    using Entry = void (*)(sim::SimModule*);
    const auto entry = reinterpret_cast<Entry>(dlsym(RTLD_DEFAULT, "megashard_sim_module"));
    if (entry != nullptr) entry(&loaded);
    return loaded;
  }();
  return module;
}

c10::Device device_of_tests() { return on_simulated_device() ? c10::kCUDA : c10::kCPU; }

at::Generator generator_of_tests(uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(device_of_tests()).clone();
  generator.set_current_seed(seed);
  return generator;
}

void run_on_simulated_device() {
  use_simulated_device();
  simulated_cuda();
  set_default_device_of_tests(c10::kCUDA);
  ::testing::UnitTest::GetInstance()->listeners().Append(new FindingsListener);
}

}  // namespace megashard::testing
