#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <numeric>
#include <string>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/refuse_threads.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

constexpr int64_t kBlock = BlockWriter::kBlockBytes;

std::string content(int64_t bytes) {
  std::string text(static_cast<size_t>(bytes), '\0');
  uint32_t state = 1;
  for (auto& c : text) c = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  return text;
}

uint32_t crc_of(const std::string& text) { return crc32(0, text.data(), static_cast<int64_t>(text.size())); }

std::string read_back(const std::string& path) { return read_small_file(path, 1 << 30); }

TEST(Crc32, IsZipsOfWholesCopiesAndParts) {
  EXPECT_EQ(crc32(crc32(0, "1234", 4), "56789", 5), 0xcbf43926U);  // the check value of CRC-32/ISO-HDLC
  EXPECT_EQ(crc32(5, nullptr, 0), 5U);
  const auto text = content(100000);
  const auto whole = crc_of(text);
  for (const int64_t begin : {0, 1, 17, 32768, 99999, 100000}) {
    const auto rest = text.size() - static_cast<size_t>(begin);
    std::string copy(rest, '\0');
    const auto first = crc32(0, text.data(), begin);
    ASSERT_EQ(copy_with_crc32(copy.data(), text.data() + begin, static_cast<int64_t>(rest), first), whole) << begin;
    ASSERT_EQ(copy, text.substr(static_cast<size_t>(begin)));
    ASSERT_EQ(join_crc32(first, crc_of(copy), static_cast<int64_t>(rest)), whole) << begin;
  }
}

TEST(OutputFile, HoldsWhatWasWrittenWhateverThePiecesAndTheReservation) {
  TemporaryFolder folder;
  const auto text = content(5 * kBlock);
  for (const int64_t length : {int64_t{0}, int64_t{100}, kBlock, kBlock + 1, 5 * kBlock - 3}) {
    for (const int64_t reserved : {int64_t{0}, 3 * kBlock, 8 * BlockWriter::kLargeBlockBytes}) {
      const auto expected = text.substr(0, static_cast<size_t>(length));
      OutputFile file(folder.file("f"), reserved);
      int64_t piece = 1;
      for (int64_t at = 0; at < length; at += piece) {
        piece = std::min(3 * piece, length - at);
        const auto part = expected.substr(static_cast<size_t>(at), static_cast<size_t>(piece));
        EXPECT_EQ(file.write(part), crc_of(part));
      }
      file.sync_and_close();
      EXPECT_EQ(file.position(), length);
      EXPECT_EQ(file.crc32(), crc_of(expected));
      EXPECT_TRUE(read_back(folder.file("f")) == expected) << length << " " << reserved;
      const InputFile written(folder.file("f"));
      const auto from = length / 3;
      EXPECT_EQ(crc32_of(written, from, length - from), crc_of(expected.substr(static_cast<size_t>(from))));
      EXPECT_THAT(message_of([&] { crc32_of(written, 0, length + 1); }), HasSubstr(written.path()));
    }
  }
}

TEST(WriteFileAtomically, AFailureLeavesNoTemporaryFile) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("taken"));
  EXPECT_THAT(message_of([&] { write_file_atomically(folder.file("taken"), "text"); }), HasSubstr("cannot rename"));
  EXPECT_FALSE(path_exists(folder.file("taken.tmp")));
}

TEST(OutputFile, AFailureOfABlockIsTheCallers) {
  TemporaryFolder folder;
  const auto text = content(kBlock);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{static_cast<rlim_t>(2 * kBlock), before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto failed = message_of([&] {
    OutputFile file(folder.file("f"));
    for (int i = 0; i < 10; ++i) file.write(text);
  });
  const auto failed_at_the_end = message_of([&] {
    OutputFile file(folder.file("g"));
    file.write(text);
    file.write(text);
    file.write("one more byte");
    file.sync_and_close();
  });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
  // Two blocks are being written at the same time: either may fail first.
  EXPECT_THAT(failed, HasSubstr("writing " + folder.file("f") + " at byte "));
  EXPECT_THAT(failed, HasSubstr(" failed: File too large"));
  EXPECT_THAT(failed_at_the_end, HasSubstr("File too large"));
}

TEST(OutputFile, WritesItselfWhereNoThreadCanBeHad) {
  TemporaryFolder folder;
  const auto text = content(3 * kBlock);
  const auto write = [&] {
    testing::refuse_threads();
    OutputFile file(folder.file("f"));
    file.write(text);
    file.sync_and_close();
    std::_Exit(read_back(folder.file("f")) == text ? 0 : 1);
  };
  EXPECT_EXIT(write(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace megashard
