#include "framework/process_group/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

using Variables = std::map<std::string, std::string>;

GetVariable getter(const Variables& variables) {
  return [&variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

LaunchEnvironment read(const Variables& variables) { return read_environment(getter(variables)); }

std::string message_of(const Variables& variables) {
  try {
    read(variables);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

struct Expected {
  int rank, world_size, local_rank, local_world_size;
  std::string master_addr;
  int master_port;  // 0: one derived from the job
  std::string launcher;
};

struct Case {
  const char* name;
  Variables variables;
  Expected expected;
};

class Environment : public testing::TestWithParam<Case> {};

TEST_P(Environment, IsRead) {
  const auto [got, launcher] = read(GetParam().variables);
  const Expected& expected = GetParam().expected;
  EXPECT_EQ(got.rank, expected.rank);
  EXPECT_EQ(got.world_size, expected.world_size);
  EXPECT_EQ(got.local_rank, expected.local_rank);
  EXPECT_EQ(got.local_world_size, expected.local_world_size);
  EXPECT_EQ(got.master_addr, expected.master_addr);
  EXPECT_EQ(launcher, expected.launcher);
  if (expected.master_port != 0) {
    EXPECT_EQ(got.master_port, expected.master_port);
  } else {
    EXPECT_GE(got.master_port, 12000);
    EXPECT_LT(got.master_port, 32000);
  }
}

const Variables kTorchrun = {{"RANK", "5"},           {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "gpu1"}, {"MASTER_PORT", "29400"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "prterun-host-77@1"}};
const Variables kMpich = {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "4"}};
const Variables kSlurm = {{"SLURM_PROCID", "6"},
                          {"SLURM_NTASKS", "8"},
                          {"SLURM_LOCALID", "2"},
                          {"SLURM_TASKS_PER_NODE", "4(x2)"},
                          {"SLURM_JOB_NODELIST", "gpu[003-004]"},
                          {"SLURM_JOB_ID", "4711"}};

Variables joined(Variables left, const Variables& right) {
  left.insert(right.begin(), right.end());
  return left;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

INSTANTIATE_TEST_SUITE_P(
    Launchers, Environment,
    testing::Values(
        Case{"nothing", {}, {0, 1, 0, 1, "127.0.0.1", 29500, "none"}},
        Case{"torchrun", kTorchrun, {5, 8, 1, 4, "gpu1", 29400, "environment"}},
        Case{"torchrun_without_local_world_size",
             without(kTorchrun, "LOCAL_WORLD_SIZE"),
             {5, 8, 1, 0, "gpu1", 29400, "environment"}},
        Case{"the_gpus_decide_without_local_rank",
             without(without(kTorchrun, "LOCAL_RANK"), "LOCAL_WORLD_SIZE"),
             {5, 8, -1, 0, "gpu1", 29400, "environment"}},
        Case{"ranks_of_a_host_follow_each_other",
             without(kTorchrun, "LOCAL_RANK"),
             {5, 8, 1, 4, "gpu1", 29400, "environment"}},
        Case{"one_rank_needs_no_address",
             {{"RANK", "0"}, {"WORLD_SIZE", "1"}},
             {0, 1, 0, 0, "127.0.0.1", 29500, "environment"}},
        Case{"torchrun_in_a_slurm_job", joined(kTorchrun, kSlurm), {5, 8, 1, 4, "gpu1", 29400, "environment"}},
        Case{"open_mpi", kOpenMpi, {1, 2, 1, 2, "127.0.0.1", 0, "Open MPI"}},
        Case{"open_mpi_on_two_hosts",
             with(with(kOpenMpi, "OMPI_COMM_WORLD_SIZE", "4"), "MASTER_ADDR", "head"),
             {1, 4, 1, 2, "head", 0, "Open MPI"}},
        Case{"open_mpi_in_a_slurm_job", joined(kOpenMpi, kSlurm), {1, 2, 1, 2, "127.0.0.1", 0, "Open MPI"}},
        Case{"mpich", kMpich, {2, 4, 2, 4, "127.0.0.1", 29500, "MPICH"}},
        Case{"mpich_with_port", with(kMpich, "MASTER_PORT", "4000"), {2, 4, 2, 4, "127.0.0.1", 4000, "MPICH"}},
        Case{"srun", kSlurm, {6, 8, 2, 4, "gpu003", 0, "Slurm"}},
        Case{"srun_sets_pmi_too",
             with(with(kSlurm, "PMI_RANK", "6"), "PMI_SIZE", "8"),
             {6, 8, 2, 4, "gpu003", 0, "Slurm"}},
        Case{"srun_uneven_nodes", with(kSlurm, "SLURM_TASKS_PER_NODE", "5,3"), {6, 8, 2, 0, "gpu003", 0, "Slurm"}},
        Case{"srun_fewer_tasks_than_a_node_takes",
             {{"SLURM_PROCID", "1"},
              {"SLURM_NTASKS", "2"},
              {"SLURM_LOCALID", "1"},
              {"SLURM_NTASKS_PER_NODE", "4"},
              {"SLURM_JOB_NODELIST", "n1"}},
             {1, 2, 1, 2, "n1", 29500, "Slurm"}},
        Case{"srun_step_nodes_come_first",
             with(kSlurm, "SLURM_STEP_NODELIST", "gpu004"),
             {6, 8, 2, 4, "gpu004", 0, "Slurm"}},
        Case{"shell_in_an_allocation",
             {{"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "4711"}},
             {0, 1, 0, 1, "127.0.0.1", 29500, "none"}}),
    [](const auto& info) { return info.param.name; });

TEST(EnvironmentErrors, NameTheVariableAndTheRemedy) {
  using testing::AllOf;
  using testing::HasSubstr;
  EXPECT_THAT(message_of({{"RANK", "0"}}),
              AllOf(HasSubstr("RANK is set but WORLD_SIZE is not"), HasSubstr("unset RANK")));
  EXPECT_THAT(message_of({{"WORLD_SIZE", "4"}}), HasSubstr("WORLD_SIZE is set but RANK is not"));
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_THAT(message_of(without(kTorchrun, name)), HasSubstr(std::string("RANK is set but ") + name + " is not"));
  }
  EXPECT_THAT(message_of(with(kTorchrun, "RANK", "8")), HasSubstr("RANK is 8 but WORLD_SIZE is 8"));
  EXPECT_THAT(message_of(with(kTorchrun, "RANK", "-1")), HasSubstr("RANK is '-1', which is no whole number"));
  EXPECT_THAT(message_of(with(kTorchrun, "RANK", "1x")), HasSubstr("RANK is '1x'"));
  EXPECT_THAT(message_of(with(kTorchrun, "LOCAL_RANK", "4")), HasSubstr("LOCAL_RANK is 4 but LOCAL_WORLD_SIZE is 4"));
  EXPECT_THAT(message_of(with(kTorchrun, "LOCAL_WORLD_SIZE", "9")),
              HasSubstr("LOCAL_WORLD_SIZE is 9 but WORLD_SIZE is 8"));
  EXPECT_THAT(message_of(with(kTorchrun, "MASTER_PORT", "70000")), HasSubstr("MASTER_PORT is 70000"));
  EXPECT_THAT(message_of(with(kTorchrun, "MASTER_ADDR", "gpu1:29400")),
              AllOf(HasSubstr("MASTER_ADDR is 'gpu1:29400', with a port"), HasSubstr("MASTER_PORT")));
  for (const char* no_host : {"tcp://gpu1", "gpu1/x", "gpu 1", "[::1]"}) {
    EXPECT_THAT(message_of(with(kTorchrun, "MASTER_ADDR", no_host)),
                HasSubstr("which is no name or address of a host"));
  }
  EXPECT_EQ(message_of(with(kTorchrun, "MASTER_ADDR", "fe80::1%eth0")), "no error");
  EXPECT_THAT(message_of(with(kOpenMpi, "OMPI_COMM_WORLD_SIZE", "4")), HasSubstr("MASTER_ADDR is not set"));
  EXPECT_THAT(message_of(without(kSlurm, "SLURM_JOB_NODELIST")), HasSubstr("SLURM_JOB_NODELIST is not"));
  EXPECT_THAT(message_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}), HasSubstr("MPI_LOCALRANKID is not"));
}

TEST(Environment, OnlyEnvAsksForAnAddress) {
  const auto environment = read_environment(getter(without(kTorchrun, "MASTER_ADDR")), {}, "tcp://gpu1:29400");
  EXPECT_EQ(environment.rendezvous.init_method, "tcp://gpu1:29400");
  EXPECT_TRUE(environment.rendezvous.agent_store_prefix.empty());  // torchrun's agent listens elsewhere
}

TEST(EnvironmentLocalRank, IsTheFlagsWhereTheLauncherIsSilent) {
  const auto read = [](const Variables& variables, int local_rank) {
    return read_environment(getter(variables), local_rank).rendezvous.local_rank;
  };
  EXPECT_EQ(read({}, 3), 3);
  const int said = read_environment(getter(kTorchrun)).rendezvous.local_rank;
  EXPECT_EQ(read(without(kTorchrun, "LOCAL_RANK"), said), said);
  EXPECT_EQ(read(kTorchrun, said), said);
  for (const int wrong : {-1, said + 1}) {
    EXPECT_THROW(read(kTorchrun, wrong), UsageError);
  }
}

TEST(EnvironmentPort, IsOneOfTheJob) {
  const auto port = [](const char* job) { return read(with(kSlurm, "SLURM_JOB_ID", job)).rendezvous.master_port; };
  EXPECT_EQ(port("4711"), port("4711"));
  EXPECT_NE(port("4711"), port("4712"));
}

TEST(EnvironmentStore, IsTheAgentsUnderTorchrun) {
  EXPECT_EQ(read(kTorchrun).rendezvous.agent_store_prefix, "");
  const auto agent = with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True");
  EXPECT_EQ(read(agent).rendezvous.agent_store_prefix, "/worker/attempt_0");
  EXPECT_EQ(read(with(agent, "TORCHELASTIC_RESTART_COUNT", "2")).rendezvous.agent_store_prefix, "/worker/attempt_2");
}

TEST(SlurmHosts, FirstOfTheList) {
  EXPECT_EQ(first_slurm_host("login"), "login");
  EXPECT_EQ(first_slurm_host("a,b"), "a");
  EXPECT_EQ(first_slurm_host("gpu[003-007,9],login"), "gpu003");
  EXPECT_EQ(first_slurm_host("rack[2-3]node[4,7]"), "rack2node4");
  EXPECT_EQ(first_slurm_host("n[5]-ib"), "n5-ib");
  for (const char* bad : {"", ",a", "gpu[1-2", "gpu]1"}) EXPECT_THROW(first_slurm_host(bad), UsageError) << bad;
}

}  // namespace
}  // namespace megashard
