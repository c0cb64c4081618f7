#include "parallel/collectives/rendezvous.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cstdlib>
#include <numeric>

#include "parallel/collectives/deadline_store.h"
#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/listening_socket.h"
#include "parallel/collectives/rendezvous_members.h"
#include "parallel/collectives/rendezvous_store.h"
#include "parallel/collectives/routed_process_group.h"
#include "parallel/collectives/start_wait.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/device/cuda_module.h"

namespace megashard {

namespace {

constexpr const char* kReached = "megashard/reached";  // address of rank 0's machine for ranks on other machines

struct Meeting {
  GroupStorePtr store;
  std::string gloo_address = kLoopback;  // see GlooGroupOptions
};

bool names_gloo_interface() {
  const char* given = std::getenv("GLOO_SOCKET_IFNAME");
  return given != nullptr && *given != '\0';
}

/// Address on which Gloo listens for several machines: this machine's address on the route to rank 0. A rank that
/// reaches rank 0 by loopback (e.g. because /etc/hosts maps its host to 127.0.1.1) is on rank 0's machine and listens
/// on the address by which others reach it.
std::string gloo_address(c10d::Store& store, const MeetingStore& met) {
  if (names_gloo_interface() || met.reached.empty()) return "";
  if (!met.own.empty()) return met.own;
  if (!store.check({kReached})) return kLoopback;  // all ranks are on this machine
  const std::vector<uint8_t> bytes = store.get(kReached);
  return std::string(bytes.begin(), bytes.end());
}

Meeting meet(const RendezvousOptions& options, const std::string& gpu, WaitTeller& teller) {
  if (options.world_size == 1) return {.store = make_in_process_store()};
  const bool tcp = options.init_method == "env://" || options.init_method.starts_with("tcp://");
  TORCH_CHECK_VALUE(tcp || options.init_method.starts_with("file://"), "unknown init method '", options.init_method,
                    "'; give env://, tcp://HOST:PORT or file:///PATH");
  const StartDeadline deadline(options.timeout);
  const MeetingStore met = tcp ? make_tcp_store(options, deadline, teller) : make_file_store(options);
  met.store->setTimeout(options.timeout);
  const auto store = c10::make_intrusive<DeadlineStore>(met.store, [deadline] { return deadline.left(); });
  if (!met.own.empty()) store->set(kReached, std::vector<uint8_t>(met.reached.begin(), met.reached.end()));
  meet_all_ranks(*store, options, gpu, deadline, teller);
  Meeting meeting{.store = std::make_shared<GroupStore>()};
  meeting.store->store = met.store;
  if (options.local_world_size != options.world_size) meeting.gloo_address = gloo_address(*store, met);
  teller.wait_for("the connections of all ranks to each other");
  return meeting;
}

/// Makes this rank's GPU the current device; returns its index.
int choose_gpu(const CudaModule& cuda, const RendezvousOptions& options) {
  const int devices = cuda.device_count();
  TORCH_CHECK(devices > 0, "backend '", options.backend, "' needs a GPU and there is none that CUDA can use: check ",
              "the driver with nvidia-smi, or take --distributed-backend gloo");
  const int gpu = (options.local_rank < 0 ? options.rank : options.local_rank) % devices;
  cuda.set_device(gpu);
  return gpu;
}

/// A write to a dead rank shall fail with an error message; the signal would end this process without one. Keeps a
/// handler set by the user.
void ignore_broken_connections() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

ProcessGroupPtr make_world(const RendezvousOptions& options) {
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
  const Meeting meeting = meet(options, nccl ? cuda.device_identity(gpu) : std::string(), teller);
  std::vector<int> ranks(static_cast<size_t>(options.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto in_store = [](const char* prefix, c10::intrusive_ptr<c10d::Store> store) {
    const auto part = std::make_shared<GroupStore>();
    part->store = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
    return part;
  };
  const auto make_gloo = [&] {
    return make_gloo_group({.store = in_store("gloo", meeting.store->store),
                            .rank = options.rank,
                            .ranks = ranks,
                            .timeout = options.timeout,
                            .address = meeting.gloo_address,
                            .waits = std::make_shared<GroupWaits>(options.long_wait)});
  };
  if (!nccl) return make_gloo();
  // NCCL's groups connect at any time, and c10d's threads poll for other ranks' state.
  auto at_any_time =
      c10::make_intrusive<DeadlineStore>(meeting.store->store, [timeout = options.timeout] { return timeout; });
  ProcessGroupPtr on_gpu = cuda.make_nccl_group({.store = in_store("nccl", std::move(at_any_time)),
                                                 .rank = options.rank,
                                                 .ranks = ranks,
                                                 .timeout = options.timeout,
                                                 .device = gpu});
  return both ? make_routed_group(make_gloo(), std::move(on_gpu)) : on_gpu;
}

}  // namespace

ProcessGroupPtr init_process_group(const RendezvousOptions& options) {
  try {
    return make_world(options);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {  // of the C++ library
    if (is_short_of_memory(error)) throw_short_of_memory(options.rank, error);
    throw;
  }
}

}  // namespace megashard
