#include "framework/process_group/launch_environment.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <vector>

#include "framework/diagnostics.h"
#include "framework/process_group/gpu_device.h"

namespace megashard {
namespace {

constexpr const char* kThisHost = "127.0.0.1";
constexpr int kDefaultPort = 29500;
constexpr int kFirstJobPort = 12000;  // ports derived from a job's id are below the ephemeral range
constexpr int kJobPorts = 20000;
constexpr const char* kLaunchers =
    "start the ranks with torchrun --no-python, srun, mpirun or megashard launch, which set all "
    "that is needed";

std::optional<int> parse_int(const std::string& text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || text.empty()) return std::nullopt;
  return value;
}

int port_from_job(const std::string& job) {
  uint32_t hash = 2166136261u;  // FNV-1a: identical on all ranks and machines
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return kFirstJobPort + static_cast<int>(hash % kJobPorts);
}

class Reader {
 public:
  explicit Reader(const GetVariable& get) : get_(get) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = get_(name);
    if (value && value->empty()) value.reset();
    return value;
  }

  std::optional<int> number(const std::string& name) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto parsed = parse_int(*value);
    if (!parsed || *parsed < 0) {
      throw UsageError(name + " is '" + *value + "', which is no whole number >= 0: " + kLaunchers);
    }
    return parsed;
  }

  /// Reads a variable that the launcher must have set, because `present` is set.
  int needed(const std::string& name, const std::string& present) const {
    const auto value = number(name);
    if (!value) throw missing(name, present);
    return *value;
  }

  std::optional<std::string> first_text(const std::vector<const char*>& names) const {
    for (const char* name : names) {
      if (auto value = text(name)) return value;
    }
    return std::nullopt;
  }

  static UsageError missing(const std::string& name, const std::string& present) {
    return UsageError(present + " is set but " + name + " is not: " + kLaunchers + ", or unset " + present +
                      " to run one process");
  }

 private:
  const GetVariable& get_;
};

/// Parses Slurm's tasks per node, "2(x3),1"; known only if all nodes have the same number.
int slurm_tasks_per_node(const Reader& reader, int world_size) {
  const auto per_node =
      reader.first_text({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"});
  if (!per_node || per_node->find(',') != std::string::npos) return 0;
  return std::min(world_size, parse_int(per_node->substr(0, per_node->find('('))).value_or(0));
}

bool is_slurm(const LauncherVariables& names) { return names.launcher == std::string("Slurm"); }

/// True for RANK and WORLD_SIZE, set by torchrun or by the user.
bool is_plain(const LauncherVariables& names) { return names.rank == std::string("RANK"); }

RendezvousOptions read_ranks(const Reader& reader, const LauncherVariables& names) {
  RendezvousOptions result;
  result.rank = reader.needed(names.rank, names.world_size);
  result.world_size = reader.needed(names.world_size, names.rank);
  result.local_world_size = is_slurm(names) ? slurm_tasks_per_node(reader, result.world_size)
                                            : reader.number(names.local_world_size).value_or(0);
  if (result.world_size == 1) {
    result.local_rank = reader.number(names.local_rank).value_or(0);
  } else if (is_plain(names)) {
    // Ranks of a host are consecutive; without their number, the host's GPUs decide later.
    const int local = result.local_world_size;
    const int derived = local > 0 ? result.rank % local : -1;
    result.local_rank = reader.number(names.local_rank).value_or(derived);
  } else {
    result.local_rank = reader.needed(names.local_rank, names.rank);
  }
  const auto job = reader.first_text(names.job);
  result.master_addr = kThisHost;
  result.master_port = job ? port_from_job(*job) : kDefaultPort;
  return result;
}

void check(const RendezvousOptions& options, const LauncherVariables& names) {
  const auto number = [](int value) { return std::to_string(value); };
  require(options.world_size >= 1, std::string(names.world_size) + " is 0: a world has at least one rank");
  require(options.rank < options.world_size, std::string(names.rank) + " is " + number(options.rank) + " but " +
                                                 names.world_size + " is " + number(options.world_size) +
                                                 ": ranks run from 0 to " + number(options.world_size - 1));
  if (options.local_world_size == 0) {
    require(options.local_rank < options.world_size,
            std::string(names.local_rank) + " is " + number(options.local_rank) + " but " + names.world_size + " is " +
                number(options.world_size) + ": a host has no more ranks than the world");
    return;
  }
  require(options.local_world_size <= options.world_size,
          std::string(names.local_world_size) + " is " + number(options.local_world_size) + " but " + names.world_size +
              " is " + number(options.world_size) + ": a host has no more ranks than the world");
  require(options.local_rank < options.local_world_size,
          std::string(names.local_rank) + " is " + number(options.local_rank) + " but " + names.local_world_size +
              " is " + number(options.local_world_size) + ": local ranks run from 0 to " +
              number(options.local_world_size - 1));
}

void check_host(const std::string& addr) {
  const std::string said = "MASTER_ADDR is '" + addr + "', ";
  const size_t colon = addr.find(':');
  const bool has_port =
      colon != std::string::npos && colon == addr.rfind(':') && parse_int(addr.substr(colon + 1)).has_value();
  require(!has_port, said + "with a port: give the host alone, and the port in MASTER_PORT");
  const bool fits = std::all_of(addr.begin(), addr.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_' || c == ':' || c == '%';
  });
  require(fits, said + "which is no name or address of a host: give that of rank 0's, as in gpu1");
}

/// Address of rank 0's store: MASTER_ADDR and MASTER_PORT if set, else derived from the launcher.
void read_master(const Reader& reader, const LauncherVariables& names, RendezvousOptions* options) {
  const auto addr = reader.text("MASTER_ADDR");
  const auto port = reader.number("MASTER_PORT");
  if (addr) {
    check_host(*addr);
    options->master_addr = *addr;
  }
  if (port) {
    require(*port >= 1 && *port <= 65535, "MASTER_PORT is " + std::to_string(*port) + ": ports run from 1 to 65535");
    options->master_port = *port;
  }
  if (is_plain(names) && options->world_size > 1) {
    if (!addr) throw Reader::missing("MASTER_ADDR", names.rank);
    if (!port) throw Reader::missing("MASTER_PORT", names.rank);
    if (reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True") {
      options->agent_store_prefix = "/worker/attempt_" + reader.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
    }
  }
  if (options->world_size == 1 || addr) return;
  const bool one_host = options->local_world_size == options->world_size;
  if (is_slurm(names)) {
    const auto nodes = reader.first_text({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    if (nodes) {
      options->master_addr = first_slurm_host(*nodes);
    } else if (!one_host) {
      throw Reader::missing("SLURM_JOB_NODELIST", names.rank);
    }
    return;
  }
  require(one_host, "the " + std::to_string(options->world_size) + " ranks of this " + names.launcher +
                        " job are not all on this host, and MASTER_ADDR is not set: give every rank the first "
                        "host's name in MASTER_ADDR (mpirun -x MASTER_ADDR=HOST)");
}

}  // namespace

std::string first_slurm_host(const std::string& node_list) {
  const auto malformed = [&node_list] {
    return UsageError("the node list '" + node_list +
                      "' of Slurm cannot be read: set MASTER_ADDR to the first host's name");
  };
  std::string host;
  for (size_t i = 0; i < node_list.size() && node_list[i] != ','; ++i) {
    if (node_list[i] != '[') {
      host += node_list[i];
      continue;
    }
    const size_t end = node_list.find(']', i);
    if (end == std::string::npos) throw malformed();
    const std::string numbers = node_list.substr(i + 1, end - i - 1);
    host += numbers.substr(0, numbers.find_first_of(",-"));
    i = end;
  }
  if (host.empty() || host.find(']') != std::string::npos) throw malformed();
  return host;
}

namespace {

LaunchEnvironment read_variables(const GetVariable& get, const std::string& init_method) {
  const Reader reader(get);
  if (const LauncherVariables* names = find_launcher(get)) {
    RendezvousOptions options = read_ranks(reader, *names);
    check(options, *names);
    options.init_method = init_method;
    if (init_method == "env://") read_master(reader, *names, &options);
    return {options, names->launcher};
  }
  RendezvousOptions alone{.init_method = init_method};
  alone.local_world_size = 1;
  alone.master_addr = kThisHost;
  alone.master_port = kDefaultPort;
  return {alone, "none"};
}

LaunchEnvironment read_with_flag(const GetVariable& get, int local_rank, const std::string& init_method) {
  const std::string text = std::to_string(local_rank);
  require(local_rank >= 0, "--local-rank is " + text + ", which is no whole number >= 0");
  const auto get_with_flag = [&](const std::string& name) {
    const auto value = get(name);
    const bool unsaid = name == "LOCAL_RANK" && value.value_or("").empty();
    return unsaid ? text : value;
  };
  auto result = read_variables(get_with_flag, init_method);
  int& read = result.rendezvous.local_rank;
  if (result.launcher == "none") read = local_rank;
  require(read == local_rank, "--local-rank is " + text + ", but the launcher's variables say " + std::to_string(read) +
                                  "; leave the flag out");
  return result;
}

}  // namespace

LaunchEnvironment read_environment(const GetVariable& get, std::optional<int> local_rank,
                                   const std::string& init_method) {
  try {
    return local_rank ? read_with_flag(get, *local_rank, init_method) : read_variables(get, init_method);
  } catch (const UsageError& error) {
    throw OwnUsageError(error.what());
  }
}

LaunchEnvironment read_environment(std::optional<int> local_rank, const std::string& init_method) {
  return read_environment(own_variable, local_rank, init_method);
}

ProcessGroupPtr init_process_group(const std::string& init_method) {
  RendezvousOptions options = read_environment(std::nullopt, init_method).rendezvous;
  options.backend = gpu_present() ? "cpu:gloo,cuda:nccl" : "gloo";
  return init_process_group(options);
}

}  // namespace megashard
