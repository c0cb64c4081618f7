#include "checkpoint/steps/manifest.h"

#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
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

}  // namespace
}  // namespace megashard
