#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// Value of an environment variable; nullopt when it is not set.
using GetVariable = std::function<std::optional<std::string>(const std::string& name)>;

/// The variables by which one launcher tells a process its rank. Its name: "environment" (torchrun,
/// megashard launch), "Open MPI", "MPICH" or "Slurm".
struct LauncherVariables {
  const char* launcher;
  std::vector<const char*> signs;  ///< one of them set: this launcher started the process
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  std::vector<const char*> job;  ///< where the job's identity stands, best first
};

/// Those of the launcher that started this process; null without one. A launcher that runs inside
/// another's allocation sees the outer variables too, so the inner ones are looked for first:
/// torchrun's, Open MPI's, MPICH's, Slurm's. An empty variable counts as not set.
const LauncherVariables* find_launcher(const GetVariable& get);

/// Reads the variables of this process.
std::optional<std::string> own_variable(const std::string& name);

}  // namespace megashard
