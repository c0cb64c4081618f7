#include "checkpoint/values/torch_archive.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

#include "checkpoint/files/crc32.h"
#include "checkpoint/values/value_tensors.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

at::Tensor counting(at::ScalarType dtype) {
  return at::arange(12, at::TensorOptions(at::kFloat)).view({4, 3}).to(dtype);
}

TEST(TorchArchive, EveryDtypeComesBackBitForBitAndByRows) {
  TemporaryFolder folder;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    FileRange range;
    {
      OutputFile file(folder.file("t"));
      file.write("something before");
      range = write_stored_tensor(file, counting(dtype));
      file.sync_and_close();
    }
    const InputFile file(folder.file("t"));
    const auto stored = find_stored_tensor(file, range);
    EXPECT_EQ((stored.data_offset - range.offset) % 64, 0);
    const auto rows = read_rows(file, stored, 1, 2);
    const auto expected = counting(dtype).narrow(0, 1, 2).cpu();
    ASSERT_EQ(rows.scalar_type(), dtype);
    EXPECT_EQ(std::memcmp(rows.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()), 0) << dtype;
  }
}

TEST(TorchArchive, EveryTruncationAndEveryFlippedByteIsReadOrRefused) {
  TemporaryFolder folder;
  FileRange range;
  {
    OutputFile file(folder.file("t"));
    range = write_stored_tensor(file, counting(at::kFloat));
    file.sync_and_close();
  }
  std::ifstream in(folder.file("t"), std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(in)), {});
  const auto read = [&](const std::string& bytes, FileRange where) {
    std::ofstream(folder.file("bad"), std::ios::binary) << bytes;
    const InputFile file(folder.file("bad"));
    const auto stored = find_stored_tensor(file, where);
    read_rows(file, stored, 0, stored.sizes.empty() ? 0 : stored.sizes[0]);
  };
  for (size_t length = 0; length < good.size(); length += 7) {
    const std::string part = good.substr(0, length);
    EXPECT_THAT(message_of([&] { read(part, range); }), HasSubstr("truncated")) << length;
    EXPECT_THROW(read(part, {0, static_cast<int64_t>(length)}), c10::Error) << length;
  }
  for (size_t at = 0; at < good.size(); at += 3) {
    auto bad = good;
    bad[at] = static_cast<char>(~bad[at]);
    try {
      read(bad, range);
    } catch (const c10::Error&) {  // a tensor or a c10::Error; nothing else
    }
  }
}

/// An archive of stored entries (name, content). The directory may be changed.
std::string zip_of(const std::vector<std::pair<std::string, std::string>>& entries,
                   const std::function<void(size_t, std::string& record)>& alter) {
  const auto little = [](uint64_t value, int width) {
    std::string bytes;
    for (int i = 0; i < width; ++i) bytes += static_cast<char>(value >> (8 * i));
    return bytes;
  };
  std::string zip;
  std::string directory;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& [name, content] = entries[i];
    const auto size = little(content.size(), 4);
    const auto middle = std::string(8, '\0') +
                        little(crc32(0, content.data(), static_cast<int64_t>(content.size())), 4) + size + size +
                        little(name.size(), 2) + little(0, 2);
    auto record =
        "PK\1\2" + little(20, 2) + little(20, 2) + middle + std::string(10, '\0') + little(zip.size(), 4) + name;
    zip += "PK\3\4" + little(20, 2) + middle + name + content;
    alter(i, record);
    directory += record;
  }
  return zip + directory + "PK\5\6" + std::string(4, '\0') + little(entries.size(), 2) + little(entries.size(), 2) +
         little(directory.size(), 4) + little(zip.size(), 4) + little(0, 2);
}

TEST(TorchArchive, DirectoriesThatLieAreRefused) {
  TemporaryFolder folder;
  using Entries = std::vector<std::pair<std::string, std::string>>;
  using Alter = std::function<void(size_t, std::string&)>;
  const auto read = [&](const Entries& entries, const Alter& alter) {
    std::ofstream(folder.file("zip"), std::ios::binary) << zip_of(entries, alter);
    const InputFile file(folder.file("zip"));
    const TorchArchive archive(file, {0, file.size()});
    for (const auto& [name, entry] : archive.entries()) archive.read(name, 100);
  };
  const auto open = [&](const Entries& entries, const Alter& alter) {
    return message_of([&] { read(entries, alter); });
  };
  const Entries good = {{"a/x", "12345678"}, {"a/y", "1234"}};
  const auto nothing = [](size_t, std::string&) {};
  EXPECT_NO_THROW(read(good, nothing));
  EXPECT_THAT(open({{"a/x", "1"}, {"b/x", "2"}}, nothing), HasSubstr("entry x is there twice"));
  const auto second = [](size_t at, const std::string& bytes) {
    return [=](size_t i, std::string& record) {
      if (i == 1) record.replace(at, bytes.size(), bytes);
    };
  };
  EXPECT_THAT(open(good, second(10, "\x08")), HasSubstr("a/y is compressed"));
  EXPECT_THAT(open(good, second(8, "\x01")), HasSubstr("a/y is compressed or encrypted"));
  EXPECT_THAT(open(good, second(24, "\x05")), HasSubstr("a/y has two sizes: 5 and 4"));
  EXPECT_THAT(open(good, second(20, std::string("\x05\0\0\0\x05", 5))), HasSubstr("over another"));
  EXPECT_THAT(open(good, second(42, std::string(1, '\0'))), HasSubstr("over another"));
  EXPECT_THAT(open(good, second(48, "z")), HasSubstr("entry z has a damaged header"));
}

TEST(TorchArchive, ATensorRecordWithoutArgumentsIsNoTensor) {
  TemporaryFolder folder;
  Value root = Object{"torch._utils._rebuild_parameter", Object::Opcode::kReduce, Tuple(), {}, {}, {}};
  FileRange range;
  {
    OutputFile file(folder.file("t"));
    range = write_stored_value(file, root);
    file.sync_and_close();
  }
  const InputFile file(folder.file("t"));
  EXPECT_THAT(message_of([&] { find_stored_tensor(file, range); }), HasSubstr("expected a plain tensor"));
}

TEST(RenameStorages, ManyOfThemTakeNoTimeToSpeakOf) {
  constexpr size_t kStorages = 100'000;  // would take half a minute if each were searched for among all others
  List records;
  for (size_t i = 0; i < kStorages; ++i)
    records.items.push_back(tensor_record(at::kFloat, {1}, "storage_" + std::to_string(i)));
  const auto begin = std::clock();  // CPU time of this process
  const auto renamed = rename_storages(records, 7);
  EXPECT_LT(std::clock() - begin, 5 * CLOCKS_PER_SEC);
  ASSERT_EQ(renamed.names.size(), kStorages);
  EXPECT_EQ(renamed.names.back(), "storage_" + std::to_string(kStorages - 1));
}

TEST(FileIo, APipeIsRefusedInsteadOfWaitedFor) {
  TemporaryFolder folder;
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { InputFile{folder.file("pipe")}; }), HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace megashard
