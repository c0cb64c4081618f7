#include "checkpoint/readers/checkpoint_reader.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/inspect/checkpoint_diff.h"
#include "checkpoint/inspect/checkpoint_summary.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"
#include "checkpoint/values/value_text.h"
#include "tests/checkpoint/files/temporary_folder.h"
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
  verify_checkpoint(*open_checkpoint(path), [&](const std::string& fault) { faults.push_back(fault); });
  return faults;
}

std::vector<std::string> keys_of_values(const CheckpointReader& reader) {
  std::vector<std::string> keys;
  for (const auto& value : reader.value_keys()) keys.push_back(value.key);
  return keys;
}

void flip_byte(const std::string& path, int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const auto byte = static_cast<char>(~file.get());
  file.seekp(at);
  file.put(byte);
}

TEST(CheckpointReader, AStepIsShownAndItsRowsAreRead) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("run"), 10, two_tensors(), some_values(8), nullptr);
  const auto reader = open_checkpoint(folder.file("run"));
  EXPECT_EQ(reader->format(), "torch_dcp");
  EXPECT_EQ(summarise(*reader).iteration, 10);
  ASSERT_EQ(reader->tensors().size(), 2U);
  EXPECT_EQ(reader->tensors()[0].name, "model.a");
  const auto chunks = reader->chunks("model.a");
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_EQ(chunks[0].file, "__0_0.distcp");
  EXPECT_TRUE(at::equal(reader->read_rows("model.a", 1, 2), counting({4, 3}).narrow(0, 1, 2).cpu()));
  EXPECT_THAT(keys_of_values(*reader), ElementsAre("args", "iteration"));
  EXPECT_EQ(value_text(reader->read_value("args")), "argparse.Namespace(hidden_size=8, nan=nan)");
  EXPECT_EQ(reader->read_values().at("iteration"), Value(10));
  EXPECT_THAT(faults_of(folder.file("run")), IsEmpty());
  EXPECT_THAT(testing::message_of([&] { open_checkpoint(folder.file("run"), 11); }),
              HasSubstr("iter_0000011, which is not there"));
}

TEST(CheckpointReader, RowsThatNoBytesStandForTakeNoMemory) {
  TemporaryFolder folder;
  save_checkpoint(folder.path(), 10, two_tensors(), {}, nullptr);
  const auto step = folder.file("iter_0000010");
  auto metadata = read_dcp_metadata(step);
  auto& tensor = *metadata.entries.at(0).tensor();
  tensor.sizes = tensor.chunks.at(0).sizes = {1, int64_t{1} << 55};  // the file has 48 bytes
  write_dcp_metadata(step, metadata);
  const auto reader = open_step(step);
  EXPECT_THAT(testing::message_of([&] { reader->read_rows("model.a", 0, 1); }),
              HasSubstr("for it: the checkpoint is damaged"));
}

TEST(CheckpointReader, EveryFlippedByteOfTheDataIsFoundAndNamed) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("run"), 10, two_tensors(), some_values(8), nullptr);
  const auto step = folder.file("run") + "/iter_0000010";
  const auto reader = open_checkpoint(step);
  const auto range = reader->chunks("model.b")[0].range;
  // Without a manifest, as in a step of PyTorch: checks the CRC-32 of the archive's entries.
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

TEST(CheckpointReader, ValuesThatTorchDistKeepsForAllRanksAreVerifiedWhereTheyLie) {
  TemporaryFolder folder;
  auto values = some_values(8);
  values.set("rng_state", List{{Bytes{"of rank 0"}, Bytes{"of rank 1"}}});  // one object, as Megatron
  save_checkpoint(folder.file("run"), 10, {}, values, nullptr, {.format = CheckpointFormat::kTorchDist});
  const auto step = folder.file("run") + "/iter_0000010";
  std::filesystem::remove(step + "/manifest.json");
  EXPECT_THAT(keys_of_values(*open_checkpoint(step)), ::testing::Contains("rng_state.1"));
  EXPECT_THAT(faults_of(step), IsEmpty());
  const auto data = step + "/__0_0.distcp";
  const auto text = read_small_file(data, 1 << 20);
  flip_byte(data, static_cast<int64_t>(text.find("of rank 1")));
  EXPECT_THAT(faults_of(step),
              ElementsAre(AllOf(HasSubstr(data + " at byte 0: entry data.pkl"), HasSubstr("rng_state/shard_0.0_1.1"))));
}

TEST(CheckpointReader, TheManifestNamesEveryDamagedFile) {
  TemporaryFolder folder;
  save_checkpoint(folder.file("run"), 10, two_tensors(), some_values(8), nullptr);
  const auto step = folder.file("run") + "/iter_0000010";
  flip_byte(step + "/__0_0.distcp", 40);  // a local header, which no entry's CRC-32 covers
  EXPECT_THAT(faults_of(step), ::testing::Contains(HasSubstr("__0_0.distcp")));
}

TEST(CheckpointReader, OfATrainingItIsTheStepThatARunWouldLoad) {
  TemporaryFolder folder;
  for (const int iteration : {10, 20})
    save_checkpoint(folder.path(), iteration, two_tensors(), some_values(8), nullptr);
  const auto damaged = folder.file("iter_0000020/__0_0.distcp");
  std::filesystem::resize_file(damaged, 100);
  std::vector<std::string> lines;
  const auto note = [&](const std::string& line) { lines.push_back(line); };
  EXPECT_EQ(open_checkpoint(folder.path(), std::nullopt, note)->path(), folder.file("iter_0000010"));
  EXPECT_THAT(lines, ElementsAre(AllOf(HasSubstr(damaged + " has 100 bytes instead of"),
                                       HasSubstr(folder.file("iter_0000010") + " is used"))));
  // A step that is named explicitly is shown as it is.
  lines.clear();
  EXPECT_EQ(open_checkpoint(folder.path(), 20, note)->path(), folder.file("iter_0000020"));
  EXPECT_EQ(open_checkpoint(folder.file("iter_0000020"), std::nullopt, note)->path(), folder.file("iter_0000020"));
  EXPECT_THAT(lines, IsEmpty());
}

TEST(CheckpointReader, EveryFormatIsRecognisedAndFillsAShard) {
  TemporaryFolder folder;
  const auto whole = counting({4, 3}).cpu();
  save_checkpoint(folder.file("dcp"), 10, two_tensors(), some_values(8), nullptr);
  save_checkpoint(folder.file("dist"), 10, two_tensors(), some_values(8), nullptr,
                  {.format = CheckpointFormat::kTorchDist});
  save_hf_weights(folder.file("hf"), {{"model.a", at::kFloat, {4, 3}}}, [&](const TensorInfo&) { return whole; });
  Dict tree;
  Dict model;
  model.set("a", tensor_value(whole));
  tree.set("model", model);
  {
    OutputFile file(folder.file("file.pt"));
    write_stored_value(file, tree);
    file.sync_and_close();
  }
  for (const auto& [path, format] : std::map<std::string, std::string>{{"dcp", "torch_dcp"},
                                                                       {"dist/iter_0000010/", "torch_dist"},
                                                                       {"hf", "safetensors"},
                                                                       {"hf/model.safetensors", "safetensors"},
                                                                       {"file.pt", "torch.save"}}) {
    const auto reader = open_checkpoint(folder.file(path));
    EXPECT_EQ(reader->format(), format) << path;
    ASSERT_TRUE(reader->find("model.a") != nullptr) << path;
    EXPECT_TRUE(at::equal(reader->read_tensor("model.a"), whole)) << path;
    auto shard = ShardedTensor::replicated(at::zeros({2, 2}, at::TensorOptions(at::kDouble)));
    shard.global_sizes = {4, 3};
    shard.offsets = {1, 1};
    ReadQueue reads;
    reader->read_into("model.a", shard, reads);
    reads.run();
    EXPECT_TRUE(at::equal(shard.local.cpu(), whole.narrow(0, 1, 2).narrow(1, 1, 2).to(at::kDouble))) << path;
    shard.global_sizes = {4, 4};
    EXPECT_THROW(reader->check_fit("model.a", shard), c10::ValueError) << path;
    EXPECT_THROW(reader->read_tensor("model.none"), c10::ValueError) << path;
    std::vector<std::string> faults;
    verify_checkpoint(*reader, [&](const std::string& fault) { faults.push_back(fault); });
    EXPECT_THAT(faults, IsEmpty()) << path;
  }
  std::filesystem::create_directory(folder.file("empty"));
  EXPECT_THROW(open_checkpoint(folder.file("empty")), c10::ValueError);
  EXPECT_THROW(open_checkpoint(folder.file("absent")), c10::ValueError);
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
  EXPECT_EQ(difference.equal_values, 2);  // NaN equals NaN
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
