#include "checkpoint/convert/tensor_stream.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

/// Two interleaved heads with one row each, and a vocabulary of 3 that is padded to 4.
WeightMap small_layout() {
  const std::vector<int64_t> both{4, 2}, one{2, 2};
  auto words = rows_part("embed", 0, 3, "words", both, 0);
  words.padded = true;
  return {.groups = {{{{"q", one}, {"k", one}},
                      {{"megatron",
                        {rows_part("q", 0, 1, "qk", both, 0), rows_part("k", 0, 1, "qk", both, 1),
                         rows_part("q", 1, 1, "qk", both, 2), rows_part("k", 1, 1, "qk", both, 3)}}}},
                     {{{"embed", {3, 2}}}, {{"megatron", {words}}}}}};
}

TensorStream stream_of(std::map<std::string, at::Tensor> tensors) {
  TensorStream stream;
  stream.where = "HERE";
  for (const auto& [key, tensor] : tensors) stream.tensors.push_back({key, tensor.scalar_type(), tensor.sizes().vec()});
  stream.read = [tensors](const std::string& key) { return tensors.at(key); };
  return stream;
}

/// In host memory, as the tensors of a stream.
at::Tensor counting(int64_t first, std::vector<int64_t> sizes) {
  const auto on_host = at::TensorOptions(at::kFloat).device(at::kCPU);
  return at::arange(first, first + sizes[0] * sizes[1], on_host).view(sizes);
}

std::map<std::string, at::Tensor> training() {
  std::map<std::string, at::Tensor> tensors = {
      {"model.q", counting(0, {2, 2})}, {"model.k", counting(10, {2, 2})}, {"model.embed", counting(20, {3, 2})}};
  for (const char* name : {"q", "k"}) {
    tensors[std::string("optimizer.state.") + name + ".exp_avg"] = tensors.at(std::string("model.") + name).add(100);
    tensors[std::string("optimizer.state.") + name + ".step"] = at::full({}, 7.0);
  }
  return tensors;
}

TEST(TensorStream, MegatronsRowsAndBuffers) {
  const auto layout = small_layout();
  const auto megatron = as_megatron(stream_of(training()), layout);
  std::map<std::string, at::Tensor> read;
  for (const auto& info : megatron.tensors) {
    read[info.name] = megatron.read(info.name);
    EXPECT_EQ(read[info.name].sizes().vec(), info.sizes) << info.name;
  }
  const auto rows = at::tensor({0, 1, 10, 11, 2, 3, 12, 13}, at::kFloat).view({4, 2});
  const auto words = at::tensor({20, 21, 22, 23, 24, 25, 0, 0}, at::kFloat).view({4, 2});
  ASSERT_EQ(read.size(), 4U);  // without the embedding, which has no state
  EXPECT_TRUE(at::equal(read.at("model.qk"), rows));
  EXPECT_TRUE(at::equal(read.at("model.words"), words));
  EXPECT_TRUE(at::equal(read.at("optimizer.state.qk.exp_avg"), rows.add(100)));
  EXPECT_EQ(read.at("optimizer.state.qk.step").item<float>(), 7.0F);

  const auto back = as_hugging_face(stream_of(read), layout);
  const auto expected = training();
  ASSERT_EQ(back.tensors.size(), expected.size());
  for (const auto& info : back.tensors) {
    const auto tensor = back.read(info.name);
    EXPECT_EQ(tensor.sizes().vec(), info.sizes) << info.name;
    EXPECT_TRUE(at::equal(tensor, expected.at(info.name))) << info.name;
  }
}

TEST(TensorStream, AnyPaddingIsTakenOff) {
  auto tensors =
      std::map<std::string, at::Tensor>{{"model.qk", counting(0, {4, 2})}, {"model.words", counting(20, {9, 2})}};
  const auto back = as_hugging_face(stream_of(tensors), small_layout());
  EXPECT_TRUE(at::equal(back.read("model.embed"), counting(20, {3, 2})));
  tensors["model.words"] = counting(20, {2, 2});
  EXPECT_THAT(message_of([&] { as_hugging_face(stream_of(tensors), small_layout()); }),
              HasSubstr("[3, 2] or more rows"));
}

TEST(TensorStream, WhatIsMissingOrLeftIsNamed) {
  auto tensors = training();
  tensors.erase("model.k");
  EXPECT_THAT(message_of([&] { as_megatron(stream_of(tensors), small_layout()); }),
              HasSubstr("HERE lacks weights that config.json asks for: model.k;"));
  tensors = training();
  tensors["model.head"] = counting(0, {1, 1});
  EXPECT_THAT(message_of([&] { as_megatron(stream_of(tensors), small_layout()); }),
              HasSubstr("no place in this model's Megatron layout: model.head;"));
  tensors = training();
  tensors["model.k"] = counting(0, {2, 2}).to(at::kBFloat16);
  EXPECT_EQ(as_megatron(stream_of(tensors), small_layout()).read("model.qk").scalar_type(), at::kFloat);
  tensors["model.k"] = counting(0, {3, 2});
  EXPECT_THAT(message_of([&] { as_megatron(stream_of(tensors), small_layout()); }),
              HasSubstr("config.json makes them [2, 2]"));
}

TEST(TensorStream, GroupsNameTheirWeights) {
  const auto names = [](const Dict& values) {
    std::vector<std::string> names;
    for (const auto& name :
         values.at("optimizer").as_dict().at("param_groups").as_items()[0].as_dict().at("params").as_items())
      names.push_back(name.as_string());
    return names;
  };
  Dict group;
  group.set("params", List{{"q", "k", "other"}});
  Dict optimizer;
  optimizer.set("param_groups", List{{group}});
  Dict values;
  values.set("optimizer", optimizer);
  rename_groups(values, small_layout(), /*to_published=*/true);
  EXPECT_THAT(names(values), ElementsAre("qk", "other"));
  rename_groups(values, small_layout(), /*to_published=*/false);
  EXPECT_THAT(names(values), ElementsAre("q", "k", "other"));
}

/// q and k, which files have in one tensor (the published form) or by themselves.
WeightMap fused_map() {
  const std::vector<int64_t> sizes{2, 2};
  const StoredForm fused{"fused", {rows_part("q", 0, 2, "qk", {4, 2}, 0), rows_part("k", 0, 2, "qk", {4, 2}, 2)}};
  const StoredForm separate{"separate", {whole_part("q", "own.q", sizes), whole_part("k", "own.k", sizes)}};
  return {.groups = {{{{"q", sizes}, {"k", sizes}}, {fused, separate}}}};
}

std::map<std::string, at::Tensor> all_of(const TensorStream& stream) {
  std::map<std::string, at::Tensor> read;
  for (const auto& info : stream.tensors) {
    read[info.name] = stream.read(info.name);
    EXPECT_EQ(read[info.name].sizes().vec(), info.sizes) << info.name;
    EXPECT_EQ(read[info.name].scalar_type(), info.dtype) << info.name;
  }
  return read;
}

TEST(TensorStream, AnyFormOfAMap) {
  const auto q = counting(0, {2, 2}), k = counting(10, {2, 2}), other = counting(20, {3, 2});
  const auto fused = at::cat({q, k});
  const std::vector<std::map<std::string, at::Tensor>> forms = {
      {{"model.q", q}, {"model.k", k}},
      {{"model.qk", fused}},
      {{"model.own.q", q}, {"model.own.k", k.to(at::kBFloat16)}},  // gets the dtype that holds both
  };
  for (auto stored : forms) {
    stored["model.other"] = other;
    const auto model = all_of(as_model(stream_of(stored), fused_map()));
    ASSERT_EQ(model.size(), 3U);
    EXPECT_TRUE(at::equal(model.at("model.q"), q));
    EXPECT_TRUE(at::equal(model.at("model.k"), k));
    EXPECT_TRUE(at::equal(model.at("model.other"), other));
    const auto published = all_of(as_published(stream_of(stored), fused_map()));
    ASSERT_EQ(published.size(), 2U);
    EXPECT_TRUE(at::equal(published.at("model.qk"), fused));
  }
  const auto half = all_of(as_published(stream_of({{"model.own.q", q}}), fused_map()));
  EXPECT_EQ(half.count("model.own.q"), 1U);  // as it is; the check of weights says what is missing
}

}  // namespace
}  // namespace megashard
