#include "framework/data/indexed_dataset.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/framework/data/token_files.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void overwrite(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string open_error(const std::string& prefix) {
  return message_of([&] { IndexedDataset dataset(prefix); });
}

// Two documents, the first of two sequences, written by megatron-core's IndexedDatasetBuilder.
TEST(IndexedDataset, WritesTheFormatByteForByte) {
  const std::string prefix = fresh_prefix("set");
  IndexedDatasetWriter writer(prefix, TokenType::kUInt16);
  writer.add_sequence(std::vector<int64_t>{1, 2, 3});
  writer.add_sequence(std::vector<int64_t>{258});
  writer.end_document();
  writer.add_document(std::vector<int64_t>{65535, 0});
  writer.finish();

  using namespace std::string_literals;
  EXPECT_EQ(bytes_of(prefix + ".bin"), "\1\0\2\0\3\0\2\1\xff\xff\0\0"s);
  EXPECT_EQ(bytes_of(prefix + ".idx"), "MMIDIDX\0\0"s + "\1\0\0\0\0\0\0\0"s + "\x08"s + "\3\0\0\0\0\0\0\0"s +
                                           "\3\0\0\0\0\0\0\0"s + "\3\0\0\0\1\0\0\0\2\0\0\0"s +
                                           "\0\0\0\0\0\0\0\0\6\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0"s +
                                           "\0\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0"s);

  const IndexedDataset dataset(prefix);
  EXPECT_THAT(dataset.sequence_lengths(), ElementsAre(3, 1, 2));
  EXPECT_THAT(dataset.document_indices(), ElementsAre(0, 2, 3));
  std::vector<int64_t> tokens(2);
  dataset.copy_tokens(0, 1, tokens);
  EXPECT_THAT(tokens, ElementsAre(2, 3));
  dataset.copy_tokens(2, 0, tokens);
  EXPECT_THAT(tokens, ElementsAre(65535, 0));
}

TEST(IndexedDataset, ReadsEveryIntegerType) {
  for (const TokenType type : {TokenType::kUInt8, TokenType::kInt8, TokenType::kInt16, TokenType::kInt32,
                               TokenType::kInt64, TokenType::kUInt16}) {
    const std::string prefix = fresh_prefix("set");
    const bool is_signed = type != TokenType::kUInt8 && type != TokenType::kUInt16;
    const std::vector<int64_t> written = {0, 127, is_signed ? -1 : 200};
    IndexedDatasetWriter writer(prefix, type);
    writer.add_document(written);
    writer.finish();
    const IndexedDataset dataset(prefix);
    EXPECT_EQ(dataset.token_type(), type);
    std::vector<int64_t> tokens(3);
    dataset.copy_tokens(0, 0, tokens);
    EXPECT_EQ(tokens, written) << static_cast<int>(type);
  }
}

TEST(IndexedDataset, RefusesFloatsAsTokens) {
  const std::string prefix = fresh_prefix("set");
  IndexedDatasetWriter writer(prefix, TokenType::kFloat32);
  writer.add_document(std::vector<int64_t>{1});
  writer.finish();
  const IndexedDataset dataset(prefix);
  EXPECT_EQ(dataset.raw_sequence(0).size(), 4U);
  std::vector<int64_t> token(1);
  EXPECT_THAT(message_of([&] { dataset.copy_tokens(0, 0, token); }), HasSubstr("floating-point values"));
}

TEST(IndexedDataset, RefusesTokensThatDoNotFit) {
  IndexedDatasetWriter writer(fresh_prefix("set"), TokenType::kUInt16);
  EXPECT_ANY_THROW(writer.add_document(std::vector<int64_t>{65536}));
  EXPECT_ANY_THROW(writer.add_document(std::vector<int64_t>{-1}));
}

TEST(IndexedDataset, NamesAMissingFile) {
  const std::string prefix = write_documents(fresh_prefix("set"), {3});
  EXPECT_THAT(open_error(prefix + ".bin"), HasSubstr("give the prefix without .bin: " + prefix));
  std::filesystem::remove(prefix + ".bin");
  EXPECT_THAT(open_error(prefix), HasSubstr("there is no file " + prefix + ".bin"));
  std::filesystem::remove(prefix + ".idx");
  EXPECT_THAT(open_error(prefix), HasSubstr("there is no file " + prefix + ".idx"));
}

TEST(IndexedDataset, NamesFilesOfDifferentRuns) {
  const std::string prefix = write_documents(fresh_prefix("set"), {3, 5});
  std::string index = bytes_of(prefix + ".idx");
  index[17] = static_cast<char>(TokenType::kUInt16);  // but .bin has tokens of four bytes
  overwrite(prefix + ".idx", index);
  EXPECT_THAT(open_error(prefix), HasSubstr("says that a token has 2 bytes, and " + prefix +
                                            ".bin has 4 for each: they are of different runs"));
}

TEST(IndexedDataset, NamesEveryTruncation) {
  const std::string prefix = write_documents(fresh_prefix("set"), {3, 5});
  const std::string index = bytes_of(prefix + ".idx");
  for (size_t length = 0; length < index.size(); ++length) {
    overwrite(prefix + ".idx", index.substr(0, length));
    EXPECT_THAT(open_error(prefix), HasSubstr(prefix + ".idx is truncated")) << length;
  }
  overwrite(prefix + ".idx", index);
  EXPECT_EQ(IndexedDataset(prefix).sequence_lengths().size(), 2);  // repaired
  overwrite(prefix + ".bin", bytes_of(prefix + ".bin").substr(0, 31));
  EXPECT_THAT(open_error(prefix), HasSubstr("lies outside " + prefix + ".bin, which has 31 bytes"));
}

struct Damage {
  const char* name;
  size_t offset;
  uint64_t value;
  const char* message;
};

class DamagedIndex : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedIndex, IsNamed) {
  const std::string prefix = write_documents(fresh_prefix("set"), {3, 5});
  std::string index = bytes_of(prefix + ".idx");
  const Damage& damage = GetParam();
  std::memcpy(index.data() + damage.offset, &damage.value, damage.offset == 17 ? 1 : 8);
  overwrite(prefix + ".idx", index);
  EXPECT_THAT(open_error(prefix), HasSubstr(damage.message));
  EXPECT_THAT(open_error(prefix), HasSubstr(prefix + ".idx"));
}

constexpr uint64_t kHuge = ~uint64_t{0} / 2;
INSTANTIATE_TEST_SUITE_P(All, DamagedIndex,
                         ::testing::Values(Damage{"magic", 0, 0, "not a Megatron index"},
                                           Damage{"version", 9, 2, "index version 2"},
                                           Damage{"dtype", 17, 9, "unknown dtype code 9"},
                                           Damage{"sequences", 18, 3, "announces 3 sequences"},
                                           Damage{"sequences_huge", 18, kHuge, "truncated or corrupt"},
                                           Damage{"sequences_wrapping", 18, uint64_t{1} << 61, "truncated or corrupt"},
                                           Damage{"documents_huge", 26, kHuge, "truncated or corrupt"},
                                           Damage{"length_negative", 34, 0x00000005ffffffff, "lies outside"},
                                           Damage{"pointer_negative", 42, ~uint64_t{0}, "lies outside"},
                                           Damage{"pointer_far", 50, kHuge, "lies outside"},
                                           Damage{"first_document", 58, 1, "document bounds"},
                                           Damage{"middle_document", 66, 7, "document bound 2"},
                                           Damage{"last_document", 74, 1, "document bounds"}),
                         [](const auto& info) { return info.param.name; });

// Damage is refused or harmless: a set that opens can be read to its end.
TEST(IndexedDataset, SurvivesRandomDamage) {
  const std::string prefix = write_documents(fresh_prefix("set"), {3, 5, 1, 4});
  const std::string index = bytes_of(prefix + ".idx");
  std::mt19937 random(1);
  int opened = 0;
  for (int round = 0; round < 300; ++round) {
    std::string damaged = index;
    for (uint32_t hits = 1 + random() % 3; hits > 0; --hits) {
      damaged[random() % damaged.size()] = static_cast<char>(random() % 4 == 0 ? random() : 0xff);
    }
    overwrite(prefix + ".idx", damaged);
    try {
      const IndexedDataset dataset(prefix);
      for (size_t i = 0; i < dataset.sequence_lengths().size(); ++i) {
        dataset.raw_sequence(static_cast<int64_t>(i));
      }
      ++opened;
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr(prefix));
    }
  }
  EXPECT_LT(opened, 60);
}

TEST(IndexedDataset, RefusesASetWithoutSequences) {
  const std::string prefix = fresh_prefix("set");
  IndexedDatasetWriter(prefix, TokenType::kInt32).finish();
  EXPECT_THAT(open_error(prefix), HasSubstr("no sequence at all"));
}

}  // namespace
}  // namespace megashard
