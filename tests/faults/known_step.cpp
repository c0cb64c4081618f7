#include "tests/faults/known_step.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include "checkpoint/steps/agreement.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard::testing {
namespace {

constexpr int64_t kRows = 4001;  // uneven
constexpr int64_t kColumns = 16;
constexpr const char* kPhrase = "generation ";

ShardedTensor shard_of(const at::Tensor& whole, const ProcessGroupPtr& group) {
  auto tensor = ShardedTensor::replicated(whole);
  const auto range =
      chunk_range(whole.size(0), group == nullptr ? 1 : group->size(), rank_in(group));
  tensor.local = whole.narrow(0, range.offset, range.size).clone();
  tensor.offsets[0] = range.offset;
  return tensor;
}

ShardedTensors tensors_of(Mark mark, const ProcessGroupPtr& group) {
  const int64_t first = (mark.iteration * 1000 + mark.generation) * kRows * kColumns;
  const auto whole = at::arange(first, first + kRows * kColumns, at::TensorOptions(at::kLong));
  return {{"model.w", shard_of(whole.view({kRows, kColumns}), group)},
          {"optimizer.state.w.step", ShardedTensor::replicated(whole.slice(0, 0, 3).clone())}};
}

}  // namespace

void save_known_step(const std::string& directory, Mark mark, const ProcessGroupPtr& group,
                     const SaveOptions& options) {
  Dict values;
  values.set("iteration", mark.iteration);
  values.set("generation", mark.generation);
  values.set("phrase", kPhrase + std::to_string(mark.generation));
  save_checkpoint(directory, mark.iteration, tensors_of(mark, group), values, group, options);
}

std::optional<Mark> load_known_step(const std::string& directory, const ProcessGroupPtr& group,
                                    const FindOptions& options) {
  const auto step = find_step(directory, group, options);
  if (!step) return std::nullopt;
  const auto loaded = tensors_of({}, group);
  const auto values = load_checkpoint(*step, loaded, group).values;
  const Mark mark{values.at("iteration").as_int(), values.at("generation").as_int()};
  TORCH_CHECK(mark.iteration == step->iteration, step->folder, " holds iteration ", mark.iteration);
  TORCH_CHECK(values.at("phrase").as_string() == kPhrase + std::to_string(mark.generation), step->folder,
              " mixes values of several saves");
  const auto expected = tensors_of(mark, group);
  for (size_t i = 0; i < loaded.size(); ++i) {
    TORCH_CHECK(at::equal(loaded[i].second.local, expected[i].second.local), step->folder, ": ", loaded[i].first,
                " is not what was saved");
  }
  return mark;
}

}  // namespace megashard::testing
