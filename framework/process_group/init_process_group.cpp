#include "framework/process_group/init_process_group.h"

#include "framework/process_group/gpu_device.h"
#include "framework/process_group/launch_environment.h"

namespace megashard {

ProcessGroupPtr init_process_group(const std::string& init_method) {
  RendezvousOptions options = read_environment(std::nullopt, init_method).rendezvous;
  options.backend = gpu_present() ? "cpu:gloo,cuda:nccl" : "gloo";
  return init_process_group(options);
}

}  // namespace megashard
