#include "checkpoint/hugging_face/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/hugging_face/hf_weights.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

at::Tensor counting(at::ScalarType dtype, std::vector<int64_t> sizes) {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return at::arange(numel, at::TensorOptions(at::kFloat)).to(dtype).view(sizes);
}

void write_raw(const std::string& path, const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  std::ofstream(path, std::ios::binary) << length << header << data;
}

TEST(Safetensors, EveryDtypeComesBackBitForBit) {
  TemporaryFolder folder;
  std::vector<TensorInfo> infos;
  std::vector<at::Tensor> tensors;
  for (const auto dtype : {at::kBool, at::kByte, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kInt, at::kLong,
                           at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kShort, at::kChar}) {
    tensors.push_back(counting(dtype, {3, 5}));
    infos.push_back({std::string("t.") + c10::toString(dtype), dtype, {3, 5}});
  }
  tensors.push_back(counting(at::kFloat, {0, 4}));
  infos.push_back({"empty", at::kFloat, {0, 4}});
  tensors.push_back(counting(at::kFloat, std::vector<int64_t>()));
  infos.push_back({"scalar", at::kFloat, {}});
  std::map<std::string, at::Tensor> by_name;
  for (size_t i = 0; i < infos.size(); ++i) by_name[infos[i].name] = tensors[i];

  SafetensorsWriter writer(folder.file("x.safetensors"), infos);
  for (const auto& info : writer.tensors()) writer.write(by_name.at(info.name));
  EXPECT_FALSE(std::filesystem::exists(folder.file("x.safetensors")));  // written by finish()
  writer.finish();

  const SafetensorsFile file(folder.file("x.safetensors"));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  ASSERT_EQ(file.tensors().size(), infos.size());
  for (const auto& [name, written] : by_name) {
    const auto expected = written.cpu();
    const auto read = file.tensor(name);
    EXPECT_EQ(read.scalar_type(), expected.scalar_type()) << name;
    ASSERT_EQ(read.sizes(), expected.sizes()) << name;
    EXPECT_EQ(std::memcmp(read.const_data_ptr(), expected.const_data_ptr(), read.nbytes()), 0) << name;
  }
}

TEST(Safetensors, MisalignedDataIsCopied) {
  TemporaryFolder folder;
  std::string data("\x01", 1);
  const float value = 2.5F;
  data.append(reinterpret_cast<const char*>(&value), 4);
  write_raw(folder.file("m"),
            R"({"b":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},)"
            R"("f":{"dtype":"F32","shape":[],"data_offsets":[1,5]}} )",
            data);
  EXPECT_EQ(SafetensorsFile(folder.file("m")).tensor("f").item<float>(), 2.5F);
}

TEST(Safetensors, DamagedAndHostileFilesAreRefused) {
  TemporaryFolder folder;
  const auto path = folder.file("bad");
  const auto refused = [&](const std::string& header, const std::string& data) {
    write_raw(path, header, data);
    return message_of([&] { SafetensorsFile file(path); });
  };
  const std::string four(4, 'x');
  EXPECT_THAT(refused("[]", ""), HasSubstr("not a JSON object"));
  EXPECT_THAT(refused("{\"a\":", ""), HasSubstr("no JSON, or was cut short"));
  EXPECT_THAT(refused("{\"a\":{},\"b\":{},\"a\":{}}", ""), HasSubstr("the key \"a\" twice"));
  EXPECT_THAT(refused("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}", ""), HasSubstr("nested deeper"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "xxx"), HasSubstr("truncated"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "xxxxx"), HasSubstr("damaged"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", four), HasSubstr("take 8"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})", four), HasSubstr("F99"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", four), HasSubstr("shape"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}})", four),
              HasSubstr("impossible sizes"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", four), HasSubstr("data_offsets"));
  EXPECT_THAT(refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                      R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                      four),
              HasSubstr("overlap"));
  std::ofstream(path, std::ios::binary) << std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8);
  EXPECT_THAT(message_of([&] { SafetensorsFile file(path); }), HasSubstr("no safetensors file"));
  std::ofstream(path, std::ios::binary) << "abc";
  EXPECT_THAT(message_of([&] { SafetensorsFile file(path); }), HasSubstr("too short"));
  EXPECT_THAT(message_of([&] { SafetensorsFile file(folder.file("absent")); }), HasSubstr("cannot read"));
}

TEST(HfWeights, ShardsAreWrittenAndFoundThroughTheIndex) {
  TemporaryFolder folder;
  std::vector<TensorInfo> infos;
  for (int i = 0; i < 5; ++i) infos.push_back({"w" + std::to_string(i), at::kFloat, {4}});
  const auto data = [](const TensorInfo& info) {
    return at::arange(4, at::TensorOptions(at::kFloat)).add_(info.name.back() - '0');
  };
  save_hf_weights(folder.path(), infos, data, {.max_shard_bytes = 32});
  EXPECT_TRUE(std::filesystem::exists(folder.file("model-00003-of-00003.safetensors")));
  {
    const auto weights = open_hf_weights(folder.path());
    EXPECT_EQ(weights->file_names().size(), 3U);
    EXPECT_EQ(weights->tensors().size(), 5U);
    EXPECT_TRUE(at::equal(weights->read_tensor("w3"), data(infos[3]).cpu()));
    EXPECT_THAT(message_of([&] { weights->read_tensor("w9"); }), HasSubstr("no tensor \"w9\""));
  }
  save_hf_weights(folder.path(), infos, data);  // replaces all of the earlier files
  EXPECT_EQ(open_hf_weights(folder.path())->file_names().size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(folder.file("model.safetensors.index.json")));
}

TEST(HfWeights, AnIndexThatLiesIsRefused) {
  TemporaryFolder folder;
  const auto refused = [&](const std::string& index) {
    std::ofstream(folder.file("model.safetensors.index.json")) << index;
    return message_of([&] { open_hf_weights(folder.path()); });
  };
  EXPECT_THAT(message_of([&] { open_hf_weights(folder.path()); }), HasSubstr("save_pretrained"));
  EXPECT_THAT(refused("{}"), HasSubstr("weight_map"));
  EXPECT_THAT(refused(R"({"weight_map":{"a":"../secret.safetensors"}})"), HasSubstr("not in a file of this folder"));
  EXPECT_THAT(refused(R"({"weight_map":{"a":"model-00001-of-00001.safetensors"}})"),
              HasSubstr("of which model-00001-of-00001.safetensors is missing"));
  write_raw(folder.file("model-1.safetensors"), "{}", "");
  EXPECT_THAT(refused(R"({"weight_map":{"a":"model-1.safetensors"}})"), HasSubstr("but it is not there"));
}

}  // namespace
}  // namespace megashard
