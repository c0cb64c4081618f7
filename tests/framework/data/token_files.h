#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "framework/data/gpt_dataset.h"
#include "framework/data/indexed_dataset.h"
#include "tests/framework/data/indexed_dataset_writer.h"
#include "tests/support/message_of.h"

namespace megashard {

// A prefix in a folder of the running test, which is emptied first.
inline std::string fresh_prefix(const std::string& name) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const auto folder =
      std::filesystem::path(::testing::TempDir()) / (std::string(test->test_suite_name()) + "." + test->name());
  std::filesystem::create_directories(folder);
  const std::string prefix = (folder / name).string();
  std::filesystem::remove(prefix + ".bin");
  std::filesystem::remove(prefix + ".idx");
  return prefix;
}

// Writes documents of the given lengths. Their tokens count up from `first`.
inline std::string write_documents(const std::string& prefix, const std::vector<int>& lengths, int64_t first = 0) {
  IndexedDatasetWriter writer(prefix, TokenType::kInt32);
  for (const int length : lengths) {
    std::vector<int64_t> tokens(static_cast<size_t>(length));
    std::iota(tokens.begin(), tokens.end(), first);
    first += length;
    writer.add_document(tokens);
  }
  writer.finish();
  return prefix;
}

using testing::message_of;

}  // namespace megashard
