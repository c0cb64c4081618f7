#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// Returns an environment variable; nullopt if unset.
using GetVariable = std::function<std::optional<std::string>(const std::string& name)>;

/// Variables with which a launcher tells a process its rank. Names: "environment" (torchrun, megashard launch), "Open
/// MPI", "MPICH" or "Slurm".
struct LauncherVariables {
  const char* launcher;
  std::vector<const char*> signs;  ///< if one is set, this launcher started the process
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  std::vector<const char*> job;  ///< variables with the job's identity, best first
};

/// The launcher that started this process; null if there is none. A launcher inside another's allocation also sees the
/// outer variables, so the inner ones are checked first: torchrun's, Open MPI's, MPICH's, Slurm's. Empty variables
/// count as unset.
const LauncherVariables* find_launcher(const GetVariable& get);

/// Reads the variables of this process.
std::optional<std::string> own_variable(const std::string& name);

}  // namespace megashard
