#include "tests/faults/known_step.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include "parallel/collectives/agreement.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard::testing {
namespace {

constexpr int64_t kRows = 4001;  // uneven
constexpr int64_t kLargeRows = 140003;
constexpr int64_t kColumns = 16;
constexpr const char* kPhrase = "generation ";

ShardedTensor shard_of(const at::Tensor& whole, const ProcessGroupPtr& group) {
  auto tensor = ShardedTensor::replicated(whole);
  const auto range = chunk_range(whole.size(0), group == nullptr ? 1 : group->size(), rank_in(group));
  tensor.local = whole.narrow(0, range.offset, range.size).clone();
  tensor.offsets[0] = range.offset;
  return tensor;
}

ShardedTensors tensors_of(Mark mark, const ProcessGroupPtr& group) {
  const bool is_large = mark.iteration > 0 && mark.iteration % 5 == 0;
  const int64_t rows = is_large ? kLargeRows : kRows;
  const int64_t number = mark.iteration * 1000 + mark.generation;
  const int64_t first = number * kLargeRows * kColumns;
  const auto whole = at::arange(first, first + rows * kColumns, at::TensorOptions(at::kLong));
  const auto step = at::full({}, static_cast<double>(number), at::TensorOptions(at::kFloat));
  return {{"model.w", shard_of(whole.view({rows, kColumns}), group)},
          {"optimizer.state.w.exp_avg", ShardedTensor::replicated(whole.slice(0, 0, 3).clone())},
          {"optimizer.state.w.step", ShardedTensor::replicated(step)}};
}

std::string phrase_of(Mark mark) { return kPhrase + std::to_string(mark.generation); }

}  // namespace

void save_known_step(const std::string& directory, Mark mark, const ProcessGroupPtr& group, const SaveOptions& options,
                     AsyncSaver* saver) {
  Dict values;
  values.set("iteration", mark.iteration);
  values.set("generation", mark.generation);
  values.set("phrase", phrase_of(mark));
  Dict ranks;
  ranks.set(std::to_string(rank_in(group)), phrase_of(mark));
  values.set("rng_state", std::move(ranks));
  const auto tensors = tensors_of(mark, group);
  const AsyncSaver::Write write = [=](const ShardedTensors& shards, const ProcessGroupPtr& ranks) {
    save_checkpoint(directory, mark.iteration, shards, values, ranks, options);
  };
  if (saver == nullptr) return write(tensors, group);
  saver->start("iteration " + std::to_string(mark.iteration), tensors, write);
  for (const auto& [key, tensor] : tensors) tensor.local.fill_(-1);
  saver->wait();
}

std::optional<Mark> load_known_step(const std::string& directory, const ProcessGroupPtr& group,
                                    const FindOptions& options) {
  const auto step = find_step(directory, group, options);
  if (!step) return std::nullopt;
  const auto values = load_checkpoint(*step, {}, group, {.strict = false, .wanted = {}}).values;
  const Mark mark{values.at("iteration").as_int(), values.at("generation").as_int()};
  TORCH_CHECK(mark.iteration == step->iteration, step->folder, " holds iteration ", mark.iteration);
  bool is_whole = values.at("phrase").as_string() == phrase_of(mark);
  for (const auto& [rank, phrase] : values.at("rng_state").as_dict().entries)
    is_whole = is_whole && phrase.as_string() == phrase_of(mark);
  TORCH_CHECK(is_whole, step->folder, " mixes values of several saves");
  const auto expected = tensors_of(mark, group);
  const auto loaded = tensors_of(mark, group);
  for (const auto& [key, tensor] : loaded) tensor.local.fill_(-1);
  load_checkpoint(*step, loaded, group);
  for (size_t i = 0; i < loaded.size(); ++i) {
    TORCH_CHECK(at::equal(loaded[i].second.local, expected[i].second.local), step->folder, ": ", loaded[i].first,
                " is not what was saved");
  }
  return mark;
}

}  // namespace megashard::testing
