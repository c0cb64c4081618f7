#include "parallel/collectives/rendezvous.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <numeric>

#include "parallel/collectives/deadline_store.h"
#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/rendezvous_members.h"
#include "parallel/collectives/rendezvous_store.h"
#include "parallel/collectives/routed_process_group.h"
#include "parallel/collectives/start_wait.h"
#include "parallel/device/cuda_module.h"

namespace megashard {

namespace {

GroupStorePtr make_store(const RendezvousOptions& options, const std::string& gpu, WaitTeller& teller) {
  if (options.world_size == 1) return make_in_process_store();
  const bool tcp = options.init_method == "env://" || options.init_method.starts_with("tcp://");
  TORCH_CHECK(tcp || options.init_method.starts_with("file://"), "unknown init method '", options.init_method,
              "'; give env://, tcp://HOST:PORT or file:///PATH");
  const StartDeadline deadline(options.timeout);
  const auto store = std::make_shared<GroupStore>();
  store->store = tcp ? make_tcp_store(options, deadline, teller) : make_file_store(options);
  store->store->setTimeout(options.timeout);
  const auto met = c10::make_intrusive<DeadlineStore>(store->store, [deadline] { return deadline.left(); });
  meet_all_ranks(*met, options, gpu, deadline, teller);
  teller.wait_for("the connections of all ranks to each other");
  return store;
}

/// Makes this rank's GPU the current one; returns its index.
int choose_gpu(const CudaModule& cuda, const RendezvousOptions& options) {
  const int devices = cuda.device_count();
  TORCH_CHECK(devices > 0, "backend '", options.backend, "' needs a GPU and there is none that CUDA can use: check ",
              "the driver with nvidia-smi, or take --distributed-backend gloo");
  const int gpu = (options.local_rank < 0 ? options.rank : options.local_rank) % devices;
  cuda.set_device(gpu);
  return gpu;
}

/// A write to a rank that has died is an error of that write, to be told in a message; the signal
/// would end this process without one. A handler of the user's stays.
void ignore_broken_connections() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

}  // namespace

ProcessGroupPtr init_process_group(const RendezvousOptions& options) {
  TORCH_CHECK(options.world_size > 0 && 0 <= options.rank && options.rank < options.world_size, "rank ", options.rank,
              " of a world of ", options.world_size, " does not exist: RANK counts from 0 to WORLD_SIZE - 1");
  TORCH_CHECK(options.timeout > std::chrono::milliseconds::zero(), "--distributed-timeout-minutes must be positive");
  const bool both = options.backend == "cpu:gloo,cuda:nccl" || options.backend == "cuda:nccl,cpu:gloo";
  const bool nccl = both || options.backend == "nccl";
  TORCH_CHECK(nccl || options.backend == "gloo", "unknown backend '", options.backend,
              "'; take gloo, nccl or cpu:gloo,cuda:nccl (--distributed-backend)");
  const CudaModule cuda = nccl ? load_cuda_module() : CudaModule{};
  const int gpu = nccl ? choose_gpu(cuda, options) : 0;

  ignore_broken_connections();
  WaitTeller teller(options.notice, options.first_notice);
  const GroupStorePtr store = make_store(options, nccl ? cuda.device_identity(gpu) : std::string(), teller);
  std::vector<int> ranks(static_cast<size_t>(options.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto in_store = [](const char* prefix, c10::intrusive_ptr<c10d::Store> whole) {
    const auto part = std::make_shared<GroupStore>();
    part->store = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(whole));
    return part;
  };
  const auto make_gloo = [&] {
    const bool one_machine = options.local_world_size == options.world_size;
    return make_gloo_group({.store = in_store("gloo", store->store),
                            .rank = options.rank,
                            .ranks = ranks,
                            .timeout = options.timeout,
                            .network = one_machine ? GlooNetwork::kLoopback : GlooNetwork::kDefault});
  };
  if (!nccl) return make_gloo();
  // NCCL's groups connect at any time, and c10d's threads ask for news of the others.
  auto at_any_time = c10::make_intrusive<DeadlineStore>(store->store, [timeout = options.timeout] { return timeout; });
  ProcessGroupPtr on_gpu = cuda.make_nccl_group({.store = in_store("nccl", std::move(at_any_time)),
                                                 .rank = options.rank,
                                                 .ranks = ranks,
                                                 .timeout = options.timeout,
                                                 .device = gpu});
  return both ? make_routed_group(make_gloo(), std::move(on_gpu)) : on_gpu;
}

}  // namespace megashard
