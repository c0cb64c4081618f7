#include "checkpoint/inspect/checkpoint_source.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/inspect/checkpoint_diff.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_text.h"
#include "tests/checkpoint/temporary_folder.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

at::Tensor counting(std::vector<int64_t> sizes) { return at::arange(12, at::TensorOptions(at::kFloat)).view(sizes); }

ShardedTensors two_tensors() {
  return {{"model.a", ShardedTensor::replicated(counting({4, 3}))},
          {"model.b", ShardedTensor::replicated(counting({12}).to(at::kBFloat16))}};
}

Dict some_values(int64_t hidden_size) {
  Dict fields;
  fields.set("hidden_size", hidden_size);
  fields.set("nan", std::nan(""));
  Dict values;
  values.set("args", make_namespace(fields));
  values.set("iteration", 10);
  return values;
}

std::vector<std::string> faults_of(const std::string& path) {
  std::vector<std::string> faults;
  open_checkpoint(path)->verify([&](const std::string& fault) { faults.push_back(fault); });
  return faults;
}

void flip_byte(const std::string& path, int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const auto byte = static_cast<char>(~file.get());
  file.seekp(at);
  file.put(byte);
}

TEST(CheckpointSource, AStepIsShownAndItsRowsAreRead) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("run"), 10, two_tensors(), some_values(8), nullptr);
  const auto source = open_checkpoint(folder.file("run"));
  EXPECT_EQ(source->format(), "torch_dcp");
  EXPECT_EQ(source->iteration(), 10);
  ASSERT_EQ(source->tensors().size(), 2U);
  const auto& tensor = source->tensors()[0];
  EXPECT_EQ(tensor.info.name, "model.a");
  ASSERT_EQ(tensor.chunks.size(), 1U);
  EXPECT_EQ(tensor.chunks[0].file, "__0_0.distcp");
  EXPECT_TRUE(at::equal(source->rows(0, 1, 2), counting({4, 3}).narrow(0, 1, 2).cpu()));
  EXPECT_THAT(source->value_keys(), ElementsAre("args", "iteration"));
  EXPECT_EQ(value_text(source->value(0)), "argparse.Namespace(hidden_size=8, nan=nan)");
  EXPECT_THAT(faults_of(folder.file("run")), IsEmpty());
  EXPECT_THAT(testing::message_of([&] { open_checkpoint(folder.file("run"), 11); }),
              HasSubstr("iter_0000011, which is not there"));
}

TEST(CheckpointSource, RowsThatNoBytesStandForTakeNoMemory) {
  TemporaryFolder folder;
  save_checkpoint(folder.path(), 10, two_tensors(), {}, nullptr);
  const auto step = folder.file("iter_0000010");
  auto metadata = read_dcp_metadata(step);
  auto& entry = metadata.entries.at(0);
  entry.sizes = entry.chunks.at(0).sizes = {1, int64_t{1} << 55};  // of 48 bytes
  write_dcp_metadata(step, metadata);
  const auto source = open_dcp_source(step);
  EXPECT_THAT(testing::message_of([&] { source->rows(0, 0, 1); }), HasSubstr("for it: the checkpoint is damaged"));
}

TEST(CheckpointSource, EveryFlippedByteOfTheDataIsFoundAndNamed) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("run"), 10, two_tensors(), some_values(8), nullptr);
  const auto step = folder.file("run") + "/iter_0000010";
  const auto source = open_checkpoint(step);
  const auto range = source->tensors()[1].chunks[0].range;
  // Without the manifest, as PyTorch writes a step: the CRC-32 of the archive's entries.
  std::filesystem::remove(step + "/manifest.json");
  const auto data = step + "/__0_0.distcp";
  const InputFile file(data);
  const auto stored = find_stored_tensor(file, range);
  flip_byte(data, stored.data_offset + 3);
  EXPECT_THAT(faults_of(step), ElementsAre(AllOf(HasSubstr("__0_0.distcp at byte " + std::to_string(range.offset)),
                                                 HasSubstr("entry data/0 of model.b at [0] is damaged"))));
  std::filesystem::resize_file(data, static_cast<uintmax_t>(range.offset + 5));
  EXPECT_THAT(faults_of(step), ::testing::Contains(AllOf(HasSubstr("truncated"), HasSubstr("model.b"))));
}

TEST(CheckpointSource, ValuesThatTorchDistKeepsForAllRanksAreVerifiedWhereTheyLie) {
  TemporaryFolder folder;
  auto values = some_values(8);
  values.set("rng_state", List{{Bytes{"of rank 0"}, Bytes{"of rank 1"}}});  // Megatron's one object
  save_checkpoint(folder.file("run"), 10, {}, values, nullptr, {.format = CheckpointFormat::kTorchDist});
  const auto step = folder.file("run") + "/iter_0000010";
  std::filesystem::remove(step + "/manifest.json");
  EXPECT_THAT(open_checkpoint(step)->value_keys(), ::testing::Contains("rng_state.1"));
  EXPECT_THAT(faults_of(step), IsEmpty());
  const auto data = step + "/__0_0.distcp";
  const auto text = read_small_file(data, 1 << 20);
  flip_byte(data, static_cast<int64_t>(text.find("of rank 1")));
  EXPECT_THAT(faults_of(step),
              ElementsAre(AllOf(HasSubstr(data + " at byte 0: entry data.pkl"), HasSubstr("rng_state/shard_0.0_1.1"))));
}

TEST(CheckpointSource, TheManifestNamesEveryDamagedFile) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("run"), 10, two_tensors(), some_values(8), nullptr);
  const auto step = folder.file("run") + "/iter_0000010";
  flip_byte(step + "/__0_0.distcp", 40);  // a local header: no CRC-32 of an entry covers it
  EXPECT_THAT(faults_of(step), ::testing::Contains(HasSubstr("__0_0.distcp")));
}

TEST(CheckpointSource, OfATrainingItIsTheStepThatARunWouldLoad) {
  TemporaryFolder folder;
  for (const int iteration : {10, 20})
    save_checkpoint(folder.path(), iteration, two_tensors(), some_values(8), nullptr);
  const auto damaged = folder.file("iter_0000020/__0_0.distcp");
  std::filesystem::resize_file(damaged, 100);
  std::vector<std::string> lines;
  const auto note = [&](const std::string& line) { lines.push_back(line); };
  EXPECT_EQ(open_checkpoint(folder.path(), std::nullopt, note)->iteration(), 10);
  EXPECT_THAT(lines, ElementsAre(AllOf(HasSubstr(damaged + " has 100 bytes instead of"),
                                       HasSubstr(folder.file("iter_0000010") + " is used"))));
  // A step that is asked for by name is shown as it is.
  lines.clear();
  EXPECT_EQ(open_checkpoint(folder.path(), 20, note)->iteration(), 20);
  EXPECT_EQ(open_checkpoint(folder.file("iter_0000020"), std::nullopt, note)->iteration(), 20);
  EXPECT_THAT(lines, IsEmpty());
}

TEST(CheckpointDiff, FormatsAreComparedByNames) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("run"), 10, two_tensors(), some_values(8), nullptr);
  SafetensorsWriter writer(folder.file("m.safetensors"),
                           {{"model.a", at::kFloat, {4, 3}}, {"model.b", at::kFloat, {12}}}, {});
  auto changed = counting({4, 3}).clone();
  changed[2][1] = 7.5;
  changed[3][0] = 9.25;
  writer.write(changed);
  writer.write(counting({12}));
  writer.finish();
  const auto a = open_checkpoint(folder.file("run"));
  const auto b = open_checkpoint(folder.file("m.safetensors"));
  const auto difference = diff_checkpoints(*a, *b, [](const std::string& name) { return name.starts_with("model."); });
  ASSERT_EQ(difference.tensors.size(), 2U);
  EXPECT_EQ(difference.tensors[0].differing, 2);
  EXPECT_EQ(difference.tensors[0].largest, 0.5);
  EXPECT_EQ(difference.tensors[1].a, "bfloat16[12]");
  EXPECT_EQ(difference.tensors[1].b, "float32[12]");
  EXPECT_EQ(difference.tensors[1].differing, 0);
}

TEST(CheckpointDiff, ValuesAreComparedFieldByFieldAndMissingNamesAreListed) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("a"), 10, two_tensors(), some_values(8), nullptr);
  auto tensors = two_tensors();
  tensors[1].first = "model.c";
  save_checkpoint(folder.file("b"), 10, tensors, some_values(16), nullptr);
  const auto a = open_checkpoint(folder.file("a"));
  const auto b = open_checkpoint(folder.file("b"));
  const auto difference = diff_checkpoints(*a, *b);
  ASSERT_EQ(difference.tensors.size(), 2U);
  EXPECT_EQ(difference.tensors[0].name + difference.tensors[0].b, "model.b");
  EXPECT_EQ(difference.tensors[1].name + difference.tensors[1].a, "model.c");
  ASSERT_EQ(difference.values.size(), 1U);
  EXPECT_EQ(difference.values[0].key, "args.hidden_size");
  EXPECT_EQ(difference.values[0].b, "16");
  EXPECT_EQ(difference.equal_values, 2);  // NaN is NaN
  EXPECT_FALSE(diff_checkpoints(*a, *a).any());
}

TEST(ValueText, ControlCharactersAreShownAndLongValuesCut) {
  EXPECT_EQ(printable("a\x1b[31m\x7f\n\xc2\x9bgr\xc3\xb6\xc3\x9f"), "a\\x1b[31m\\x7f\\x0a\\x9bgr\xc3\xb6\xc3\x9f");
  EXPECT_EQ(value_text(Value(std::string(200, 'x')), 10), "\"xxxxxxxxx...");
  EXPECT_EQ(value_text(Tuple{{Value(), true, 1.5, Bytes{"abc"}, at::kBFloat16}}),
            "(None, True, 1.5, 3 bytes, torch.bfloat16)");
}

}  // namespace
}  // namespace megashard
