#include "checkpoint/torch_archive.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "checkpoint/crc32.h"
#include "tests/checkpoint/temporary_folder.h"
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
  for (const auto dtype :
       {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kInt, at::kShort,
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
    const auto expected = counting(dtype).narrow(0, 1, 2);
    ASSERT_EQ(rows.scalar_type(), dtype);
    EXPECT_EQ(std::memcmp(rows.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()), 0)
        << dtype;
  }
}

TEST(TorchArchive, CrcIsZips) { EXPECT_EQ(crc32(crc32(0, "1234", 4), "56789", 5), 0xcbf43926U); }

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
    } catch (const c10::Error&) {  // or a tensor; nothing else
    }
  }
}

}  // namespace
}  // namespace megashard
