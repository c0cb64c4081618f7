#include "parallel/device/cuda_module.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <filesystem>

namespace megashard {
namespace {

std::atomic<const char*> file_name{"libmegashard_cuda.so"};

}  // namespace

void use_simulated_device() { file_name = "libmegashard_sim.so"; }

CudaModule load_cuda_module() {
  Dl_info here;
  TORCH_INTERNAL_ASSERT(dladdr(reinterpret_cast<void*>(&load_cuda_module), &here) != 0);
  const auto path = std::filesystem::path(here.dli_fname).parent_path() / file_name.load();
  TORCH_CHECK(std::filesystem::exists(path), "this build has no CUDA (", path.string(),
              " is missing): build with a LibTorch for CUDA, or take --distributed-backend gloo");
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(module != nullptr, "cannot load ", path.string(), ": ", dlerror());
  using Entry = void (*)(CudaModule*);
  const auto entry = reinterpret_cast<Entry>(dlsym(module, "megashard_cuda_module"));
  TORCH_CHECK(entry != nullptr, path.string(), " is of another version of megashard; build again");
  CudaModule loaded{};
  entry(&loaded);
  return loaded;
}

const CudaKernels& cuda_kernels() {
  static const CudaKernels kernels = load_cuda_module().kernels;
  return kernels;
}

}  // namespace megashard
