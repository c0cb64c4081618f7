#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/steps/retention.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

uint32_t crc_of(const std::string& text) { return crc32(0, text.data(), static_cast<int64_t>(text.size())); }

using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

/// A step of two ranks: __0_0.distcp, __1_0.distcp, .metadata, manifest.json.
class ManifestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
      auto half = ShardedTensor::replicated(at::arange(2000));
      half.local = half.local.narrow(0, group->rank() * 1000, 1000).clone();
      half.offsets[0] = group->rank() * 1000;
      save_checkpoint(directory_.path(), 7, {{"model.w", half}}, {}, group);
    });
  }

  std::string step() const { return directory_.file("iter_0000007"); }
  std::string file(const std::string& name) const { return step() + "/" + name; }
  std::string damage() const { return step_damage(step(), VerifyDepth::kBytes); }

  void flip_bit(const std::string& name, int64_t byte) const {
    std::fstream stream(file(name), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(byte);
    const auto before = static_cast<char>(stream.get());
    stream.seekp(byte);
    stream.put(static_cast<char>(before ^ 4));
  }

 private:
  TemporaryFolder directory_;
};

TEST_F(ManifestTest, HasEveryFileWithItsLengthAndChecksum) {
  const auto manifest = read_manifest(step());
  EXPECT_EQ(manifest.iteration, 7);
  ASSERT_EQ(manifest.files.size(), 3U);
  for (const auto& entry : manifest.files) {
    const auto content = read_small_file(file(entry.name), 1 << 20);
    EXPECT_EQ(entry.bytes, static_cast<int64_t>(content.size()));
    EXPECT_EQ(entry.crc32, crc_of(content)) << entry.name;
  }
  EXPECT_EQ(crc_of("123456789"), 0xcbf43926U);  // CRC-32's check value
  EXPECT_EQ(damage(), "");
}

TEST_F(ManifestTest, EveryFlippedBitIsFoundInItsFile) {
  for (const char* name : {"__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"}) {
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(file(name)));
    for (int64_t byte = 0; byte < bytes; byte += std::max<int64_t>(1, bytes / 200)) {
      flip_bit(name, byte);
      ASSERT_THAT(damage(), StartsWith(file(name))) << byte;
      flip_bit(name, byte);
    }
  }
  flip_bit("__1_0.distcp", 100);
  EXPECT_THAT(damage(), HasSubstr("checksum"));
  EXPECT_EQ(step_damage(step(), VerifyDepth::kSizes), "");  // kSizes reads no data
}

TEST_F(ManifestTest, CutAndMissingFilesAreNamedWithTheRemedy) {
  const auto bytes = std::filesystem::file_size(file("__1_0.distcp"));
  std::filesystem::resize_file(file("__1_0.distcp"), 1000);
  const auto cut = message_of([&] { verify_step(step(), VerifyDepth::kSizes); });
  EXPECT_THAT(cut, StartsWith(file("__1_0.distcp") + " has 1000 bytes instead of " + std::to_string(bytes)));
  EXPECT_THAT(cut, EndsWith("load another step (--ckpt-step)"));
  std::filesystem::remove(file("__1_0.distcp"));
  EXPECT_EQ(damage(), file("__1_0.distcp") + " is missing");
  EXPECT_EQ(step_damage(step(), VerifyDepth::kBytes, 0, 3), "");  // the second rank checks other files
  EXPECT_NE(step_damage(step(), VerifyDepth::kBytes, 2, 3), "");
}

TEST_F(ManifestTest, StepsOfOthersAreWholeWhenTheirMetadataIs) {
  std::filesystem::remove(file("manifest.json"));
  EXPECT_EQ(damage(), "");
  std::filesystem::resize_file(file("__1_0.distcp"), 1000);
  EXPECT_THAT(damage(), HasSubstr("__1_0.distcp has 1000 bytes instead of at least"));
  std::filesystem::remove(file("__1_0.distcp"));
  EXPECT_THAT(damage(), HasSubstr("__1_0.distcp is missing"));
  std::ofstream(file("common.pt")) << "torch_dist";
  EXPECT_THAT(damage(), HasSubstr("has no metadata.json"));
  std::filesystem::remove(file("common.pt"));
  std::filesystem::remove(file(".metadata"));
  EXPECT_THAT(damage(), HasSubstr("has no .metadata"));
}

TEST(Manifest, WhatIsNoneIsRefused) {
  TemporaryFolder folder;
  write_manifest(folder.path(), {3, {{"__0_0.distcp", 10, 0xabcdef01}}});
  auto text = read_small_file(folder.file("manifest.json"), 1000);
  EXPECT_EQ(parse_manifest(text, "m").files.at(0).crc32, 0xabcdef01U);
  const auto refused = [&](const std::string& json) { return message_of([&] { parse_manifest(json, "m"); }); };
  for (size_t end = 0; end + 2 < text.size(); ++end)
    EXPECT_THAT(refused(text.substr(0, end)), HasSubstr("m is no JSON, or was cut short"));
  EXPECT_THAT(refused(std::string(1 << 16, '[')), HasSubstr("m is nested deeper than 32"));
  EXPECT_THAT(refused("[1]"), HasSubstr("m is damaged, or no manifest"));
  text.insert(1, R"("iteration":4,)");
  EXPECT_THAT(refused(text), HasSubstr("m has the key \"iteration\" twice"));
  const auto named = [](const std::string& name) {
    const std::string body =
        R"({"files":{")" + name + R"(":{"bytes":1,"crc32":"00000000"}},"format_version":1,"iteration":0})";
    char crc[9];
    std::snprintf(crc, sizeof crc, "%08x", crc_of(body));
    return R"({"crc32":")" + std::string(crc) + R"(",)" + body.substr(1);
  };
  EXPECT_EQ(parse_manifest(named("__0_0.distcp"), "m").files.size(), 1U);
  for (const char* name : {"../up", "/root", "a/b", "..", ".", "", "manifest.json", "a\\u0000b"})
    EXPECT_THAT(refused(named(name)), HasSubstr("not one of its folder")) << name;
}

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

TEST(RunHistory, StepsOfWhatARunWentOnFromAreItsOwnUpToThatStep) {
  const auto first = new_run();
  const auto second = gone_on_from(first, 20);
  const auto third = gone_on_from(second, 25);
  EXPECT_NE(first.id, second.id);
  EXPECT_EQ(kinship(third, third.id, 90), Kinship::kOwn);
  EXPECT_EQ(kinship(third, first.id, 20), Kinship::kOwn);
  EXPECT_EQ(kinship(third, first.id, 21), Kinship::kLeft);
  EXPECT_EQ(kinship(third, second.id, 25), Kinship::kOwn);
  EXPECT_EQ(kinship(third, second.id, 30), Kinship::kLeft);
  EXPECT_EQ(kinship(first, second.id, 1), Kinship::kOther);
  EXPECT_EQ(kinship(first, "", 1), Kinship::kOther);
  EXPECT_EQ(kinship({}, "", 1), Kinship::kOwn);
}

/// A folder with the steps of several runs.
class RunsInAFolder : public ::testing::Test {
 protected:
  void save(int64_t iteration, const RunHistory& run) const {
    StepWriter step(directory_.path(), iteration);
    step.begin();
    OutputFile file(step.folder() + "/__0_0.distcp");
    file.write("data");
    step.commit({file.sync_and_close()}, run);
  }
  std::string step(int64_t iteration) const { return directory_.file("iter_00000" + std::to_string(iteration)); }
  void damage(int64_t iteration) const { std::ofstream(step(iteration) + "/__0_0.distcp") << "d"; }
  void tear_manifest(int64_t iteration) const { std::ofstream(step(iteration) + "/manifest.json") << "{"; }
  void lose_tracker() const { std::filesystem::remove(directory_.file("latest_checkpointed_iteration.txt")); }
  int64_t find() {
    line_.clear();
    return find_step(directory_.path(), nullptr, {.notice = [this](const std::string& line) { line_ = line; }})
        ->iteration;
  }
  std::vector<int64_t> left() const {
    std::vector<int64_t> iterations;
    for (const auto& each : list_steps(directory_.path())) iterations.push_back(each.iteration);
    return iterations;
  }

  TemporaryFolder directory_;
  RunHistory old_ = new_run(), new_ = new_run();
  std::string line_;
};

TEST_F(RunsInAFolder, AManifestKeepsTheHistory) {
  const auto run = gone_on_from(gone_on_from(old_, 3), 7);
  save(10, run);
  const auto found = run_of_step(step(10));
  EXPECT_EQ(found.id, run.id);
  ASSERT_EQ(found.before.size(), 2U);
  EXPECT_EQ(found.before[0].id, old_.id);
  EXPECT_EQ(found.before[0].last, 3);
  EXPECT_EQ(found.before[1].last, 7);
}

TEST_F(RunsInAFolder, NoneIsTakenInThePlaceOfAnothers) {
  for (const int iteration : {10, 30}) save(iteration, old_);
  save(20, new_);
  save(40, new_);
  EXPECT_EQ(find(), 40);
  damage(40);
  EXPECT_EQ(find(), 20);
  EXPECT_THAT(line_, HasSubstr(step(30) + ", " + step(10) + " are of another run; " + step(20) + " is used instead"));
  testing::run_ranks(
      2, [&](const ProcessGroupPtr& group) { TORCH_CHECK(find_step(directory_.path(), group)->iteration == 20); });
  damage(20);
  EXPECT_THAT(message_of([&] { find(); }), HasSubstr("has no whole step to use instead"));
}

TEST_F(RunsInAFolder, WhatARunHasLeftIsNotTaken) {
  for (const int iteration : {10, 20, 30}) save(iteration, old_);
  const auto branch = gone_on_from(old_, 10);
  save(35, branch);
  damage(35);
  EXPECT_EQ(find(), 10);
}

TEST_F(RunsInAFolder, WithoutATrackerOrItsManifestThereMayBeOneRunOnly) {
  for (const int iteration : {10, 20}) save(iteration, old_);
  lose_tracker();
  EXPECT_EQ(find(), 20);
  save(30, old_);
  tear_manifest(30);
  EXPECT_EQ(find(), 20);
  save(30, new_);
  lose_tracker();
  EXPECT_THAT(message_of([&] { find(); }), HasSubstr("are steps of different runs"));
  save(40, old_);
  tear_manifest(40);
  EXPECT_THAT(message_of([&] { find(); }), HasSubstr("name a step with --ckpt-step"));
  EXPECT_EQ(find_step(directory_.path(), nullptr, {.ckpt_step = 20})->iteration, 20);
}

TEST_F(RunsInAFolder, RetentionTakesNoneOfAnother) {
  for (const int iteration : {10, 20, 70}) save(iteration, old_);
  for (const int iteration : {30, 40, 50}) save(iteration, new_);
  remove_old_steps(directory_.path(), 50, {.most_recent = 1});
  EXPECT_THAT(left(), ElementsAre(70, 50, 20, 10));
  remove_old_steps(directory_.path(), 50, {.other_runs = true});
  EXPECT_THAT(left(), ElementsAre(50));
}

TEST_F(RunsInAFolder, WhatARunHasLeftDoesNotCountAsRecent) {
  for (const int iteration : {10, 20, 30}) save(iteration, old_);
  save(35, gone_on_from(old_, 10));
  remove_old_steps(directory_.path(), 35, {.most_recent = 2});
  EXPECT_THAT(left(), ElementsAre(35, 10));
}

TEST_F(RunsInAFolder, AStepsOwnFolderIsThatStep) {
  for (const int iteration : {10, 20}) save(iteration, old_);
  std::ofstream(step(10) + "/.metadata") << "";  // both formats have this file
  for (const auto& path : {step(10), step(10) + "/", directory_.path() + "/./iter_0000010"}) {
    const auto found = find_step(path, nullptr);
    EXPECT_EQ(found->iteration, 10);
    EXPECT_TRUE(std::filesystem::equivalent(std::filesystem::path(found->folder).parent_path(), directory_.path()));
  }
  EXPECT_EQ(find_step(step(10), nullptr, {.ckpt_step = 10})->iteration, 10);
  EXPECT_THAT(message_of([&] { find_step(step(10), nullptr, {.ckpt_step = 20}); }),
              HasSubstr("is itself the step 10, and --ckpt-step asks for 20"));
  std::filesystem::create_symlink(step(10), directory_.file("best"));
  EXPECT_EQ(find_step(directory_.file("best"), nullptr)->iteration, 10);
  damage(10);
  EXPECT_THAT(message_of([&] { find_step(step(10), nullptr); }), HasSubstr("name another step"));
  std::filesystem::rename(step(20), directory_.file("second"));
  std::ofstream(directory_.file("second/.metadata")) << "";
  EXPECT_THAT(message_of([&] { find_step(directory_.file("second"), nullptr); }),
              HasSubstr("its name does not say of which iteration"));
  EXPECT_THAT(message_of([&] { find_step(directory_.file("iter_0000099"), nullptr); }), HasSubstr("there is no step "));
}

}  // namespace

}  // namespace megashard
