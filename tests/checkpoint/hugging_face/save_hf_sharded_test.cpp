#include "checkpoint/hugging_face/save_hf_sharded.h"

#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "checkpoint/hugging_face/hf_weights.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

const HfSaveOptions kSmallFiles{.max_shard_bytes = 300};

std::map<std::string, at::Tensor> whole_weights() {
  const auto counting = [](at::ScalarType dtype, std::vector<int64_t> sizes) {
    const auto numel = checked_numel(sizes).value_or(0);
    return at::arange(numel, at::TensorOptions(at::kFloat)).to(dtype).view(sizes);
  };
  return {{"a.rows", counting(at::kFloat, {7, 3})},      {"b.columns", counting(at::kBFloat16, {4, 10})},
          {"c.block", counting(at::kDouble, {6, 2, 8})}, {"d.replica", counting(at::kLong, {5})},
          {"e.scalar", counting(at::kHalf, {})},         {"f.empty", counting(at::kFloat, {0, 3})},
          {"g.fp8", counting(at::kFloat8_e4m3fn, {9})}};
}

/// The rank's shard along `dim`.
ShardedTensor cut(const at::Tensor& whole, int64_t dim, const ProcessGroupPtr& group) {
  auto tensor = ShardedTensor::replicated(whole);
  const auto range = chunk_range(whole.size(dim), group->size(), group->rank());
  tensor.local = whole.narrow(dim, range.offset, range.size);
  tensor.offsets[static_cast<size_t>(dim)] = range.offset;
  return tensor;
}

ShardedTensors pieces(const ProcessGroupPtr& group) {
  const std::map<std::string, int64_t> dims = {{"a.rows", 0}, {"b.columns", 1}, {"c.block", 2}, {"g.fp8", 0}};
  ShardedTensors tensors;
  for (const auto& [name, whole] : whole_weights()) {
    const auto dim = dims.find(name);
    tensors.emplace_back(name, dim == dims.end() ? ShardedTensor::replicated(whole) : cut(whole, dim->second, group));
  }
  return tensors;
}

std::map<std::string, std::string> files_in(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    files[entry.path().filename().string()] = {std::istreambuf_iterator<char>(in), {}};
  }
  return files;
}

TEST(SaveHfSharded, AnyNumberOfRanksWritesTheFilesOfOne) {
  TemporaryFolder folder;
  const auto weights = whole_weights();
  std::vector<TensorInfo> infos;
  for (const auto& [name, whole] : weights) infos.push_back({name, whole.scalar_type(), whole.sizes().vec()});
  save_hf_weights(
      folder.file("one"), infos, [&](const TensorInfo& info) { return weights.at(info.name); }, kSmallFiles);
  const auto expected = files_in(folder.file("one"));
  ASSERT_GT(expected.size(), 2U);
  for (const int ranks : {1, 2, 3, 4}) {
    const auto path = folder.file(std::to_string(ranks));
    std::filesystem::create_directory(path);
    std::ofstream(path + "/model.safetensors") << "of an earlier save";
    testing::run_ranks(ranks,
                       [&](const ProcessGroupPtr& group) { save_hf_sharded(path, pieces(group), group, kSmallFiles); });
    EXPECT_EQ(files_in(path), expected) << ranks;
  }
}

TEST(SaveHfSharded, AFailureIsOneOnAllRanksAndLeavesTheEarlierWeights) {
  TemporaryFolder folder;
  std::ofstream(folder.file("model.safetensors")) << "of an earlier save";
  EXPECT_THAT(message_of([&] {
                testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
                  auto tensors = pieces(group);
                  if (group->rank() == 1) tensors.pop_back();
                  save_hf_sharded(folder.path(), tensors, group);
                });
              }),
              HasSubstr("g.fp8"));
  const std::map<std::string, std::string> before = {{"model.safetensors", "of an earlier save"}};
  EXPECT_EQ(files_in(folder.path()), before);
}

}  // namespace
}  // namespace megashard
