#include "parallel/collectives/rendezvous.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <filesystem>
#include <numeric>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/routed_process_group.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/cuda/cuda_module.h"

namespace megashard {

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

struct Address {
  std::string host;
  int port = 0;
};

Address parse_address(const RendezvousOptions& options) {
  Address address{options.master_addr, options.master_port};
  if (options.init_method == "env://") {
    TORCH_CHECK(!address.host.empty(), "init method env:// needs MASTER_ADDR and MASTER_PORT: start the ranks with ",
                "`megashard launch` or torchrun, or give tcp://HOST:PORT");
  } else {
    const std::string rest = options.init_method.substr(std::string("tcp://").size());
    const size_t colon = rest.rfind(':');
    TORCH_CHECK(colon != std::string::npos && colon > 0, "init method '", options.init_method,
                "' should read tcp://HOST:PORT");
    address.host = rest.substr(0, colon);
    const char* end = rest.data() + rest.size();
    const auto parsed = std::from_chars(rest.data() + colon + 1, end, address.port);
    TORCH_CHECK(parsed.ec == std::errc() && parsed.ptr == end, "init method '", options.init_method,
                "' should read tcp://HOST:PORT, and '", rest.substr(colon + 1), "' is no port");
    if (address.host.front() == '[')
      address.host = address.host.substr(1, address.host.size() - 2);  // IPv6
  }
  TORCH_CHECK(0 < address.port && address.port < 65536, "port ", address.port,
              " of the master is not between 1 and 65535 (--master-port or MASTER_PORT)");
  return address;
}

Store make_tcp_store(const RendezvousOptions& options) {
  const Address address = parse_address(options);
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(address.port);
  tcp.isServer = options.rank == 0 && options.agent_store_prefix.empty();
  tcp.waitWorkers =
      false;  // the ranks are counted when they connect to each other, by a clearer sentence
  tcp.timeout = options.timeout;
  const auto started = std::chrono::steady_clock::now();
  Store store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(address.host, tcp);
  } catch (const std::exception& error) {
    const std::string cause = first_line(error);
    const bool in_use = cause.find("EADDRINUSE") != std::string::npos;
    TORCH_CHECK(!in_use, "rank 0 cannot listen on port ", address.port, ": it is in use by another program or by an ",
                "earlier run that has not ended; take another one (--master-port or MASTER_PORT)");
    const auto seconds =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - started)
            .count();
    TORCH_CHECK(false, "rank ", options.rank, " of ", options.world_size, " cannot reach rank 0 at ", address.host, ":",
                address.port, " after ", seconds, " s: start rank 0, and check address, port and firewall ",
                "(MASTER_ADDR, MASTER_PORT) [", cause, "]");
  }
  if (options.agent_store_prefix.empty()) return store;
  return c10::make_intrusive<c10d::PrefixStore>(options.agent_store_prefix, store);
}

Store make_file_store(const RendezvousOptions& options) {
  const std::string path = options.init_method.substr(std::string("file://").size());
  TORCH_CHECK(path.size() > 1 && path.front() == '/', "init method '", options.init_method,
              "' should read file:///PATH with an absolute path");
  const auto folder = std::filesystem::path(path).parent_path();
  TORCH_CHECK(std::filesystem::is_directory(folder), "init method '", options.init_method, "': folder ",
              folder.string(), " does not exist; create it, in a place that every rank sees");
  try {
    return c10::make_intrusive<c10d::FileStore>(path, options.world_size);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "init method '", options.init_method, "': rank ", options.rank, " cannot use ", path, " [",
                first_line(error), "]");
  }
}

std::string read(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.get(key);
  return std::string(bytes.begin(), bytes.end());
}

/// Every rank there once, and all of them started for the same world.
void check_members(c10d::Store& store, const RendezvousOptions& options) {
  const auto started = std::chrono::steady_clock::now();
  std::string world_of_rank_0;
  int64_t takers = 0;
  try {
    takers = store.add("megashard/rank/" + std::to_string(options.rank), 1);
    if (options.rank == 0 && takers == 1) {
      const std::string mine = std::to_string(options.world_size);
      store.set("megashard/world_size", std::vector<uint8_t>(mine.begin(), mine.end()));
    }
    world_of_rank_0 = read(store, "megashard/world_size");
  } catch (const std::exception& error) {
    const auto seconds =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - started)
            .count();
    TORCH_CHECK(false, "rank ", options.rank, " of ", options.world_size, " waited ", seconds,
                " s for rank 0 to come: start it, or raise --distributed-timeout-minutes [", first_line(error), "]");
  }
  TORCH_CHECK(takers == 1, options.init_method.starts_with("file://")
                               ? "another process already was rank " + std::to_string(options.rank) + " in " +
                                     options.init_method + ": give each run a new file"
                               : "two processes are rank " + std::to_string(options.rank) +
                                     ": give each its own RANK, and each job its own port");
  TORCH_CHECK(world_of_rank_0 == std::to_string(options.world_size), "rank ", options.rank,
              " was started for a world of ", options.world_size, ", rank 0 for one of ", world_of_rank_0,
              ": give every rank the same WORLD_SIZE");
}

GroupStorePtr make_store(const RendezvousOptions& options) {
  if (options.world_size == 1) return make_in_process_store();
  const bool tcp = options.init_method == "env://" || options.init_method.starts_with("tcp://");
  TORCH_CHECK(tcp || options.init_method.starts_with("file://"), "unknown init method '", options.init_method,
              "'; give env://, tcp://HOST:PORT or file:///PATH");
  const auto store = std::make_shared<GroupStore>();
  store->store = tcp ? make_tcp_store(options) : make_file_store(options);
  store->store->setTimeout(options.timeout);
  check_members(*store->store, options);
  return store;
}

CudaModule load_cuda(const RendezvousOptions& options) {
  const CudaModule cuda = load_cuda_module();
  const int devices = cuda.device_count();
  TORCH_CHECK(devices > 0, "backend '", options.backend, "' needs a GPU and there is none that CUDA can use: check ",
              "the driver with nvidia-smi, or take --distributed-backend gloo");
  TORCH_CHECK(options.local_rank < devices, "local rank ", options.local_rank, " has no GPU of its own: this machine ",
              "has ", devices, "; start at most that many ranks on it");
  cuda.set_device(options.local_rank);
  return cuda;
}

/// A write to a rank that has died is an error of that write, to be told in a sentence; the signal
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
  const bool both =
      options.backend == "cpu:gloo,cuda:nccl" || options.backend == "cuda:nccl,cpu:gloo";
  const bool nccl = both || options.backend == "nccl";
  TORCH_CHECK(nccl || options.backend == "gloo", "unknown backend '", options.backend,
              "'; take gloo, nccl or cpu:gloo,cuda:nccl (--distributed-backend)");
  const CudaModule cuda = nccl ? load_cuda(options) : CudaModule{};

  ignore_broken_connections();
  const GroupStorePtr store = make_store(options);
  std::vector<int> ranks(static_cast<size_t>(options.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto in_store = [&](const char* prefix) {
    const auto part = std::make_shared<GroupStore>();
    part->store = c10::make_intrusive<c10d::PrefixStore>(prefix, store->store);
    return part;
  };
  const auto make_gloo = [&] {
    const bool one_machine = options.local_world_size == options.world_size;
    return make_gloo_group(
        {.store = in_store("gloo"),
         .rank = options.rank,
         .ranks = ranks,
         .timeout = options.timeout,
         .network = one_machine ? GlooNetwork::kLoopback : GlooNetwork::kDefault});
  };
  if (!nccl) return make_gloo();
  ProcessGroupPtr on_gpu = cuda.make_nccl_group({.store = in_store("nccl"),
                                                 .rank = options.rank,
                                                 .ranks = ranks,
                                                 .timeout = options.timeout,
                                                 .device = options.local_rank});
  return both ? make_routed_group(make_gloo(), std::move(on_gpu)) : on_gpu;
}

}  // namespace megashard
