#include "checkpoint/convert/convert_torch.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/checkpoint.h"
#include "parallel/sharded_tensor.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

TEST(ConvertDcpToTorch, AFolderInThePlaceOfTheFileIsRefusedBeforeTheWork) {
  TemporaryFolder folder;
  save_checkpoint(folder.path(), 1, {{"model.w", ShardedTensor::replicated(at::ones({2}))}}, {}, nullptr);
  const auto target = folder.file("model.pt");
  std::filesystem::create_directory(target);
  int lines = 0;
  const auto count = [&lines](const std::string&) { ++lines; };
  EXPECT_THAT(testing::message_of([&] { convert_dcp_to_torch(folder.file("iter_0000001"), target, count); }),
              ::testing::HasSubstr(target + " exists already"));
  EXPECT_EQ(lines, 0);
  EXPECT_FALSE(std::filesystem::exists(target + ".tmp"));
}

}  // namespace
}  // namespace megashard
