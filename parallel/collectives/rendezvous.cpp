#include "parallel/collectives/rendezvous.h"

#include <c10/util/Exception.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "parallel/collectives/deadline_store.h"
#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/probe_address.h"
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

namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr size_t kRanksNamed = 4;  // maximum number of ranks named in a line

constexpr const char* kWorldSize = "megashard/world_size";
constexpr const char* kMembers = "megashard/members";
constexpr const char* kVerdict = "megashard/verdict";  // kAllCame or an error message
constexpr const char* kAllCame = "all came";
constexpr const char* kMissing = "megashard/missing";  // rank 0's last count of missing ranks, and their names

std::string rank_key(int rank) { return "megashard/rank/" + std::to_string(rank); }

std::vector<uint8_t> text_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string read(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.get(key);
  return std::string(bytes.begin(), bytes.end());
}

/// "rank 3" or "ranks 1, 2, 3, 4 and 60 more". Rank 0 checks each rank; the others, possibly thousands, read only the
/// count: ranks never leave, so an equal count means that rank 0's names still hold.
std::string missing_ranks(c10d::Store& store, const RendezvousOptions& options) {
  if (options.rank != 0) {
    const auto count = std::to_string(options.world_size - store.add(kMembers, 0));
    const std::string seen = store.check({kMissing}) ? read(store, kMissing) : "";
    if (seen.starts_with(count + " ")) return seen.substr(count.size() + 1);
    return count + (count == "1" ? " other rank" : " other ranks");
  }
  std::string names;
  size_t count = 0;
  for (int rank = 1; rank < options.world_size; ++rank) {
    if (store.check({rank_key(rank)})) continue;
    if (++count <= kRanksNamed) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (count > kRanksNamed) names += " and " + std::to_string(count - kRanksNamed) + " more";
  names = (count == 1 ? "rank " : "ranks ") + names;
  store.set(kMissing, text_bytes(std::to_string(count) + " " + names));
  return names;
}

/// Waits for `key`; false at the deadline. Calls `look` at growing intervals of at most 8 s.
bool await_key(c10d::Store& store, const std::string& key, const StartDeadline& deadline, int ranks,
               const std::function<void()>& look) {
  auto next_look = std::chrono::steady_clock::now() + Milliseconds(500);
  auto between = Milliseconds(500);
  while (true) {
    if (store.check({key})) return true;
    if (deadline.left() == Milliseconds(0)) return false;
    if (std::chrono::steady_clock::now() >= next_look) {
      look();
      next_look += between = std::min(2 * between, Milliseconds(8000));
    }
    std::this_thread::sleep_for(deadline.pause(ranks));
  }
}

[[noreturn]] void fail_for_all(c10d::Store& store, const std::string& message) {
  store.compareSet(kVerdict, {}, text_bytes(message));
  TORCH_CHECK(false, message);
}

/// Registers this rank and checks that it is valid.
void register_rank(c10d::Store& store, const RendezvousOptions& options, const std::string& gpu,
                   const StartDeadline& deadline, WaitTeller& teller) {
  const std::string rank = std::to_string(options.rank);
  const bool first = store.add(rank_key(options.rank), 1) == 1;
  if (options.rank == 0 && first) store.set(kWorldSize, text_bytes(std::to_string(options.world_size)));
  const std::string place = meeting_place(options);
  teller.wait_for("rank 0 at " + place);
  TORCH_CHECK(await_key(store, kWorldSize, deadline, options.world_size, [] {}), "rank ", rank, " of ",
              options.world_size, " waited ", deadline.waited(), " for rank 0 to come to ", place,
              ": start it, or raise --distributed-timeout-minutes");
  if (!first) {
    fail_for_all(store, options.init_method.starts_with("file://")
                            ? "another process already was rank " + rank + " in " + place + ": give each run a new file"
                            : "two processes are rank " + rank + ": give each its own RANK, and each job its own port");
  }
  const std::string world = read(store, kWorldSize);
  if (world != std::to_string(options.world_size)) {
    fail_for_all(store, "rank " + rank + " was started for a world of " + std::to_string(options.world_size) +
                            ", rank 0 for one of " + world + ": give every rank the same WORLD_SIZE");
  }
  if (!gpu.empty() && store.add("megashard/gpu/" + gpu, 1) > 1) {
    fail_for_all(store, "rank " + rank +
                            " has the GPU of another rank: start at most as many ranks on a "
                            "machine as it has GPUs, and let each see all of them or one of its own");
  }
}

}  // namespace

void meet_all_ranks(c10d::Store& store, const RendezvousOptions& options, const std::string& gpu,
                    const StartDeadline& deadline, WaitTeller& teller) {
  std::string verdict;
  try {
    register_rank(store, options, gpu, deadline, teller);
    if (store.add(kMembers, 1) == options.world_size) store.compareSet(kVerdict, {}, text_bytes(kAllCame));
    teller.wait_for("the other ranks");
    const bool told = await_key(store, kVerdict, deadline, options.world_size, [&] {
      const std::string of = " of " + std::to_string(options.world_size);
      if (teller.tells() || options.rank == 0) teller.wait_for(missing_ranks(store, options) + of);
    });
    if (!told) {
      const auto message =
          c10::str("rank ", options.rank, " of ", options.world_size, " waited ", deadline.waited(), " for ",
                   missing_ranks(store, options), ", which did not come to ", meeting_place(options),
                   ": start every rank with the same address and WORLD_SIZE, or raise --distributed-timeout-minutes");
      store.compareSet(kVerdict, {}, text_bytes(message));  // the first rank that gives up ends all
    }
    verdict = read(store, kVerdict);
  } catch (const c10::DistError& error) {
    TORCH_CHECK(false, "rank ", options.rank, " of ", options.world_size, " lost ", meeting_place(options),
                ", where the ranks meet: see whether rank 0 ended, and check the network to it [", first_line(error),
                "]");
  } catch (const std::exception& error) {
    if (!is_short_of_memory(error)) throw;
    verdict = short_of_memory(options.rank, error);
    store.compareSet(kVerdict, {}, text_bytes(verdict));
  }
  if (verdict == kAllCame) return;
  // Other ranks read it from rank 0's store, which ends with rank 0.
  if (options.rank == 0) std::this_thread::sleep_for(2 * StartDeadline::kLongestPause);
  TORCH_CHECK(false, verdict);
}

}  // namespace megashard
