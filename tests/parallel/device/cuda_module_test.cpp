#include "parallel/device/cuda_module.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "parallel/collectives/rendezvous.h"
#include "tests/support/message_of.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

#ifdef MEGASHARD_TEST_CUDA

// --as-needed silently drops libtorch_cuda, because no symbol of this project needs it; then its kernels are missing.
TEST(CudaModule, BringsTheKernelsOfLibTorch) {
  MEGASHARD_NOT_ON_SIM("it stands where CUDA's library would be");
  const auto mul = c10::Dispatcher::singleton().findSchemaOrThrow("aten::mul", "Tensor");
  // In its own process: another test may have loaded the module in this one.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::exit(mul.hasKernelForDispatchKey(c10::DispatchKey::CUDA)), ::testing::ExitedWithCode(0), "")
      << "libmegashard itself links libtorch_cuda";
  const CudaModule module = load_cuda_module();
  EXPECT_TRUE(mul.hasKernelForDispatchKey(c10::DispatchKey::CUDA));
  EXPECT_GE(module.device_count(), 0);
  EXPECT_NE(module.make_nccl_group, nullptr);
}

TEST(CudaModule, WithoutAGpuAskingForNcclSaysSo) {
  MEGASHARD_NOT_ON_SIM("there is a GPU");
  if (load_cuda_module().device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(message_of([] { init_process_group({.backend = "nccl"}); }),
              HasSubstr("backend 'nccl' needs a GPU and there is none that CUDA can use: check the driver with "
                        "nvidia-smi, or take --distributed-backend gloo"));
}

#else

TEST(CudaModule, BuildWithoutCudaSaysSo) {
  EXPECT_THAT(message_of([] { init_process_group({.backend = "nccl"}); }),
              HasSubstr("build with a LibTorch for CUDA, or take --distributed-backend gloo"));
}

#endif

}  // namespace
}  // namespace megashard
