#include "framework/training/output_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/diagnostics.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using Kind = OutputPath::Kind;

TEST(OutputPaths, NothingIsLeftOfTheTrial) {
  const TemporaryFolder folder;
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    try_output_paths({{"--a", folder.path(), Kind::kSharedFolder},
                      {"--b", folder.file("x/y/"), Kind::kSharedFolder},
                      {"--c", folder.file("z"), Kind::kFolder},
                      {"--d", folder.file("new.jsonl"), Kind::kFile},
                      {"--e", "/dev/null", Kind::kFile}},
                     group);
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(OutputPaths, AllRanksThrowWhatOneCannot) {
  const TemporaryFolder folder;
  std::ofstream(folder.file("file")) << "text";
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    const auto mine = folder.file(group->rank() == 2 ? "file" : "folder");
    const auto said = usage_error([&] { try_output_paths({{"--trace", mine, Kind::kFolder}}, group); });
    TORCH_CHECK(
        said.find(" cannot be written by rank 2: " + folder.file("file") + " is no folder; give a folder") != said.npos,
        said);
    // What only the first rank writes is no matter of the others.
    try_output_paths({{"--metrics-file", mine + "/x", Kind::kFile}}, group);
  });
}

TEST(OutputPaths, RanksMustSeeOneFolder) {
  const TemporaryFolder one, other;
  testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto& mine = group->rank() == 0 ? one : other;
    const auto said = usage_error([&] { try_output_paths({{"--save", mine.file("a"), Kind::kSharedFolder}}, group); });
    TORCH_CHECK(said.find("by rank 1: it is another folder there than on rank 0") != said.npos, said);
  });
  EXPECT_TRUE(std::filesystem::is_empty(one.path()));
}

TEST(OutputPaths, AnEmptyPathIsNone) {
  EXPECT_THAT(usage_error([] {
                try_output_paths({{"--save", "", Kind::kSharedFolder}}, nullptr);
              }),
              HasSubstr("--save  cannot be written: it is empty"));
}

}  // namespace
}  // namespace megashard
