#include "parallel/collectives/rendezvous_store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <thread>

#include "parallel/collectives/probe_address.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

namespace {

using Milliseconds = std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

struct Address {
  std::string host;
  int port = 0;
};

Address parse_address(const RendezvousOptions& options) {
  Address address{options.master_addr, options.master_port};
  if (options.init_method == "env://") {
    TORCH_CHECK_VALUE(!address.host.empty(),
                      "init method env:// needs MASTER_ADDR and MASTER_PORT: start the ranks with ",
                      "`megashard launch` or torchrun, or give tcp://HOST:PORT");
  } else {
    const std::string rest = options.init_method.substr(std::string("tcp://").size());
    const size_t colon = rest.rfind(':');
    TORCH_CHECK_VALUE(colon != std::string::npos && colon > 0, "init method '", options.init_method,
                      "' should read tcp://HOST:PORT");
    address.host = rest.substr(0, colon);
    const char* end = rest.data() + rest.size();
    const auto parsed = std::from_chars(rest.data() + colon + 1, end, address.port);
    TORCH_CHECK_VALUE(parsed.ec == std::errc() && parsed.ptr == end, "init method '", options.init_method,
                      "' should read tcp://HOST:PORT, and '", rest.substr(colon + 1), "' is no port");
    if (address.host.front() == '[') address.host = address.host.substr(1, address.host.size() - 2);  // IPv6
  }
  TORCH_CHECK_VALUE(0 < address.port && address.port < 65536, "port ", address.port,
                    " of the master is not between 1 and 65535 (--master-port or MASTER_PORT)");
  return address;
}

constexpr const char* kInUse =
    ": it is in use by another program or by an earlier run that has not ended; take another one (--master-port or "
    "MASTER_PORT)";

std::string host_and_port(const Address& address) { return address.host + ":" + std::to_string(address.port); }

/// Opens c10d's store, which has no deadline for answers and several for connecting. `listens`: serves on this socket;
/// unset: another rank serves.
std::optional<Store> open_store(const std::string& host, int port, const std::optional<ListeningSocket>& listens,
                                const StartDeadline& deadline) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(port);
  tcp.isServer = listens.has_value();
  if (listens && listens->descriptor >= 0) tcp.masterListenFd = listens->descriptor;
  // Ranks are counted later, when they meet, with a clearer message.
  tcp.waitWorkers = false;
  tcp.timeout = std::max(deadline.left(), Milliseconds(1));
  return before<Store>(deadline, [host, tcp]() -> Store { return c10::make_intrusive<c10d::TCPStore>(host, tcp); });
}

/// Listens on that name's address `reached` only. Returns no descriptor to listen on every address of this machine if
/// other ranks use one that this rank does not know: a translated address, or a name that is a loopback address on this
/// machine.
ListeningSocket listen_where_reached(const Address& address, const std::string& reached, bool on_one_machine) {
  const bool is_own_name = !on_one_machine && address.host != "localhost" && is_loopback_address(reached) &&
                           !is_loopback_address(address.host);
  const auto listens = is_own_name ? ListeningSocket() : listen_at(reached, address.port);
  TORCH_CHECK(listens.error != EADDRINUSE, "rank 0 cannot listen on port ", address.port, kInUse);
  return listens;
}

Store serve(const Address& address, const std::string& reached, bool on_one_machine, const StartDeadline& deadline) {
  const auto listens = listen_where_reached(address, reached, on_one_machine);
  std::string cause;
  try {
    if (const auto store = open_store(reached, address.port, listens, deadline)) return *store;
  } catch (const std::exception& error) {
    if (is_short_of_memory(error)) throw_short_of_memory(0, error);
    cause = first_line(error);
    const bool in_use = cause.find("EADDRINUSE") != std::string::npos;
    TORCH_CHECK(!in_use, "rank 0 cannot listen on port ", address.port, kInUse);
  }
  TORCH_CHECK(false, "rank 0 listens on port ", address.port, " of this machine, but after ", deadline.waited(),
              " it has not reached itself at ", host_and_port(address),
              ": the address must be that of rank 0's machine (MASTER_ADDR)", cause.empty() ? "" : " [" + cause + "]");
}

}  // namespace

std::string meeting_place(const RendezvousOptions& options) {
  if (options.init_method.starts_with("file://")) return options.init_method;
  return host_and_port(parse_address(options));
}

MeetingStore make_tcp_store(const RendezvousOptions& options, const StartDeadline& deadline, WaitTeller& teller) {
  const Address address = parse_address(options);
  const bool serves = options.rank == 0 && options.agent_store_prefix.empty();
  // The name is resolved anyway: the next job with it may use several machines.
  const bool on_one_machine = options.local_world_size == options.world_size && options.agent_store_prefix.empty();
  const std::string whom = "rank 0 at " + host_and_port(address);
  teller.wait_for(whom);
  MeetingStore met;
  Store& store = met.store;
  std::string why = "the name service does not answer", remedy = "check the name and the service";
  while (store == nullptr) {
    AddressProbe probe = probe_address(address.host, address.port, !serves && !on_one_machine, deadline);
    if (on_one_machine && !probe.reached.empty()) probe = probe_address(kLoopback, address.port, !serves, deadline);
    met.reached = probe.reached;
    met.own = probe.own;
    if (!probe.reached.empty() && serves) {
      teller.wait_for(whom, "it is this rank, which listens, but does not reach itself there");
      store = serve(address, probe.reached, on_one_machine, deadline);
    } else if (!probe.reached.empty()) {
      why = "something listens there, but does not answer as rank 0 does";
      remedy = "check that the port is rank 0's and that rank 0 runs";
      teller.wait_for(whom, why);
      try {
        store = open_store(probe.reached, address.port, std::nullopt, deadline).value_or(Store());
      } catch (const std::exception& error) {
        if (is_short_of_memory(error)) throw_short_of_memory(options.rank, error);
        why += " [" + first_line(error) + "]";
      }
    } else if (!probe.why.empty()) {
      why = probe.why;
      remedy = probe.remedy;
      teller.wait_for(whom, why);
    }
    TORCH_CHECK(store != nullptr || deadline.left() > Milliseconds(0), "rank ", options.rank, " of ",
                options.world_size, " cannot reach ", whom, " after ", deadline.waited(), ": ", why, "; ", remedy,
                " (MASTER_ADDR, MASTER_PORT)");
    if (store == nullptr) std::this_thread::sleep_for(deadline.pause(options.world_size));
  }
  if (!options.agent_store_prefix.empty())
    store = c10::make_intrusive<c10d::PrefixStore>(options.agent_store_prefix, store);
  return met;
}

MeetingStore make_file_store(const RendezvousOptions& options) {
  const std::string path = options.init_method.substr(std::string("file://").size());
  TORCH_CHECK(path.size() > 1 && path.front() == '/', "init method '", options.init_method,
              "' should read file:///PATH with an absolute path");
  const auto folder = std::filesystem::path(path).parent_path();
  TORCH_CHECK(std::filesystem::is_directory(folder), "init method '", options.init_method, "': folder ",
              folder.string(), " does not exist; create it, in a place that every rank sees");
  try {
    return {.store = c10::make_intrusive<c10d::FileStore>(path, options.world_size)};
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "init method '", options.init_method, "': rank ", options.rank, " cannot use ", path, " [",
                first_line(error), "]");
  }
}

}  // namespace megashard
