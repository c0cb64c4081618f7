// CUDA graphs for cuda_test.cpp. A separate module, because tests do not link libtorch_cuda.

#include <ATen/cuda/CUDAGraph.h>

#include <memory>

/// Captures what `work` enqueues on the current stream as a graph.
extern "C" void* capture_cuda_graph(void (*work)(void*), void* argument) {
  auto graph = std::make_unique<at::cuda::CUDAGraph>();
  graph->capture_begin();
  work(argument);
  graph->capture_end();
  return graph.release();
}

extern "C" void replay_cuda_graph(void* graph) { static_cast<at::cuda::CUDAGraph*>(graph)->replay(); }

extern "C" void free_cuda_graph(void* graph) { delete static_cast<at::cuda::CUDAGraph*>(graph); }
