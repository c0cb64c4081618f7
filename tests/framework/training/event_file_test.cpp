#include "framework/training/event_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "framework/diagnostics.h"

namespace megashard::testing {
namespace {

TEST(EventFile, ChecksumsAreCastagnolis) {
  EXPECT_EQ(crc32c(""), 0U);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);  // of iSCSI, RFC 3720
}

std::string only_file_of(const std::string& folder) {
  std::ostringstream text;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    EXPECT_TRUE(entry.path().filename().string().starts_with("events.out.tfevents.")) << entry.path();
    text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    ++files;
  }
  EXPECT_EQ(files, 1);
  return text.str();
}

/// What an event holds behind its time, which takes 9 bytes.
std::vector<std::string> events_of(const std::string& bytes) {
  std::vector<std::string> events;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at, sizeof length);
    events.push_back(bytes.substr(at + 12 + 9, length - 9));
    at += 8 + 4 + length + 4;
  }
  return events;
}

TEST(EventFile, HoldsProtobufsOfTheirFields) {
  const auto folder = ::testing::TempDir() + "megashard_event_file";
  std::filesystem::remove_all(folder);
  EventFile file(folder + "/run");
  file.start_at(3);
  file.add_scalar("lm loss", 1.5, 300);
  file.flush();
  const auto events = events_of(only_file_of(folder + "/run"));
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[0], "\x1a\x0d" "brain.Event:2");
  EXPECT_EQ(events[1], "\x10\x03\x3a\x02\x08\x01");
  EXPECT_EQ(events[2], std::string("\x10\xac\x02\x2a\x10\x0a\x0e\x0a\x07lm loss\x15\x00\x00\xc0\x3f", 21));
}

TEST(EventFile, AFolderThatIsAFileIsRefused) {
  const auto path = ::testing::TempDir() + "megashard_event_file_taken";
  std::ofstream(path) << "x";
  EXPECT_THROW(EventFile{path}, UsageError);
}

}  // namespace
}  // namespace megashard::testing
