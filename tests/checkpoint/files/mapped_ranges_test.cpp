#include "checkpoint/files/mapped_ranges.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "checkpoint/files/file_io.h"
#include "tests/checkpoint/files/temporary_folder.h"

namespace megashard {
namespace {

constexpr int64_t kPage = 4096;

void end(const char* message) {
  if (::write(STDERR_FILENO, message, std::strlen(message)) > 0) ::_exit(7);
}

class MappedRangesDeathTest : public ::testing::Test {
 protected:
  std::string file_of_pages(const std::string& name, int pages) {
    std::ofstream(folder_.file(name)) << std::string(static_cast<size_t>(pages * kPage), 'a');
    return folder_.file(name);
  }
  const TemporaryFolder folder_;
};

TEST_F(MappedRangesDeathTest, BytesThatTheFileHasNoMoreNameIt) {
  const auto path = file_of_pages("data.bin", 3);
  const MappedFile other(file_of_pages("other.bin", 1)), file(path);
  std::filesystem::resize_file(path, kPage);
  EXPECT_EXIT(
      {
        end_at_lost_bytes(end);
        std::_Exit(file.data()[0] == 'a' && other.data()[0] == 'a' ? file.data()[2 * kPage] : 1);
      },
      ::testing::ExitedWithCode(7),
      "data.bin was made shorter while it is read: it has 4096 bytes, and had 12288; write it again");
}

TEST_F(MappedRangesDeathTest, OtherCausesEndAsBefore) {
  const auto path = file_of_pages("data.bin", 2);
  {
    const MappedFile gone(path);  // unmapped again: others may use its addresses
  }
  EXPECT_EXIT(
      {
        end_at_lost_bytes(end);
        std::raise(SIGBUS);
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace megashard
