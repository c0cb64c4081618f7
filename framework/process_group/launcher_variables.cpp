#include "framework/process_group/launcher_variables.h"

#include <algorithm>
#include <cstdlib>

namespace megashard {
namespace {

const std::vector<LauncherVariables>& launchers() {
  static const LauncherVariables mpich{"MPICH",           {"MPI_LOCALRANKID"}, "PMI_RANK",      "PMI_SIZE",
                                       "MPI_LOCALRANKID", "MPI_LOCALNRANKS",   {"SLURM_JOB_ID"}};
  static const auto all = [] {
    LauncherVariables pmi = mpich;  // srun also sets PMI_RANK, but no local variables: then Slurm's are used
    pmi.signs = {"PMI_RANK", "PMI_SIZE"};
    return std::vector<LauncherVariables>{
        {"environment", {"RANK", "WORLD_SIZE"}, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {}},
        {"Open MPI",
         {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
         "OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_SIZE",
         "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE",
         {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"}},
        mpich,
        // A shell in an allocation has SLURM_NTASKS without SLURM_PROCID: it is one process.
        {"Slurm",
         {"SLURM_PROCID"},
         "SLURM_PROCID",
         "SLURM_NTASKS",
         "SLURM_LOCALID",
         "SLURM_NTASKS_PER_NODE",
         {"SLURM_JOB_ID"}},
        pmi};
  }();
  return all;
}

}  // namespace

const LauncherVariables* find_launcher(const GetVariable& get) {
  const auto is_set = [&get](const char* name) { return !get(name).value_or("").empty(); };
  for (const auto& names : launchers()) {
    if (std::any_of(names.signs.begin(), names.signs.end(), is_set)) return &names;
  }
  return nullptr;
}

std::optional<std::string> own_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

}  // namespace megashard
