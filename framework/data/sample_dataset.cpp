#include "framework/data/sample_dataset.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "framework/data/numpy_random.h"

namespace megashard {

void SampleDataset::check_tokens(std::span<const int64_t> tokens, int64_t index, const BatchOptions& options) const {
  for (const int64_t token : tokens) {
    TORCH_CHECK(static_cast<uint64_t>(token) < static_cast<uint64_t>(options.vocab_size), "data set \"",
                source_of(index), "\" holds token ", token, " (in sample ", index,
                "), which is not in the model's vocabulary of ", options.vocab_size,
                "; tokenise the text with the model's own tokenizer, or use a model with the vocabulary of the data");
  }
}

std::string numbered_parts(const char* unit, std::span<const int64_t> numbers) {
  constexpr size_t kShown = 3;
  std::string text = std::string(unit) + (numbers.size() == 1 ? " " : "s ");
  for (size_t i = 0; i < std::min(kShown, numbers.size()); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  return numbers.size() <= kShown ? text : text + " and " + std::to_string(numbers.size() - kShown) + " more";
}

namespace {

/// Throws if only some of a batch's rows have document lengths or position ids.
void check_alike(const std::vector<Batch>& parts) {
  const auto all_or_none = [&](auto has) {
    const auto with = std::ranges::count_if(parts, has);
    return with == 0 || with == std::ssize(parts);
  };
  TORCH_CHECK_NOT_IMPLEMENTED(
      all_or_none([](const Batch& part) { return part.document_lengths.defined(); }) &&
          all_or_none([](const Batch& part) { return part.position_ids().defined(); }),
      "--reset-position-ids and --reset-attention-mask are about documents, --neat-packing about conversations, and "
      "this blend has batches of both: leave them out, or give --micro-batch-size 1");
}

}  // namespace

std::vector<double> normalized(std::vector<double> weights) {
  const double sum = numpy_sum(weights);
  for (double& weight : weights) weight /= sum;
  return weights;
}

BlendedDataset::BlendedDataset(std::vector<std::shared_ptr<const SampleDataset>> datasets, std::vector<double> weights,
                               std::optional<int64_t> size, const std::string& split_name)
    : datasets_(std::move(datasets)), counts_(datasets_.size(), 0) {
  TORCH_CHECK(!datasets_.empty() && datasets_.size() < 32767, "a blend takes 1 to 32766 data sets, got ",
              datasets_.size());
  TORCH_CHECK(!size.has_value() || weights.size() == datasets_.size(), "a blend of ", datasets_.size(),
              " data sets takes as many weights, got ", weights.size());
  for (size_t i = 0; size.has_value() && i < weights.size(); ++i) {
    TORCH_CHECK(weights[i] > 0, "the ", split_name, " blend gives \"", datasets_[i]->source_of(0), "\" the weight ",
                weights[i], "; weights must be positive, leave the data set out");
  }
  if (size.has_value()) {
    build(normalized(std::move(weights)), *size, /*drops_spent=*/false);
  } else {
    int64_t total = 0;
    for (const auto& dataset : datasets_) total += dataset->size();
    std::vector<double> shares;
    for (const auto& dataset : datasets_)
      shares.push_back(static_cast<double>(dataset->size()) / static_cast<double>(total));
    build(shares, total, /*drops_spent=*/true);
  }
  check_not_oversampled(split_name);
}

void BlendedDataset::build(const std::vector<double>& weights, int64_t size, bool drops_spent) {
  std::vector<size_t> drawn_from(datasets_.size());
  std::iota(drawn_from.begin(), drawn_from.end(), size_t{0});
  if (drops_spent) std::erase_if(drawn_from, [this](size_t i) { return datasets_[i]->size() == 0; });
  dataset_index_.reserve(static_cast<size_t>(size));
  sample_index_.reserve(static_cast<size_t>(size));
  for (int64_t position = 0; position < size; ++position) {
    const double drawn = std::max(static_cast<double>(position), 1.0);
    const auto lag = [&](size_t i) { return weights[i] * drawn - static_cast<double>(counts_[i]); };
    const auto chosen = std::ranges::max_element(drawn_from, {}, lag);
    const size_t dataset = *chosen;
    dataset_index_.push_back(static_cast<int16_t>(dataset));
    sample_index_.push_back(counts_[dataset]++);
    if (drops_spent && counts_[dataset] == datasets_[dataset]->size()) drawn_from.erase(chosen);
  }
}

void BlendedDataset::check_not_oversampled(const std::string& split_name) const {
  for (size_t i = 0; i < datasets_.size(); ++i) {
    TORCH_CHECK(counts_[i] <= datasets_[i]->size(), "the ", split_name, " blend draws ", counts_[i], " samples from \"",
                datasets_[i]->source_of(0), "\", which has ", datasets_[i]->size(),
                "; ask for fewer samples, or give weights so that small sets are repeated");
  }
}

Batch BlendedDataset::collate(const std::vector<int64_t>& indices, const BatchOptions& options) const {
  std::vector<int64_t> samples;
  std::vector<size_t> members;
  for (const int64_t index : indices) {
    TORCH_CHECK(index >= 0 && index < size(), "the blend has samples 0 to ", size() - 1, ", got ", index);
    samples.push_back(sample_index_[static_cast<size_t>(index)]);
    members.push_back(static_cast<size_t>(dataset_index_[static_cast<size_t>(index)]));
  }
  const bool is_of_one = std::ranges::count(members, members.front()) == std::ssize(members);
  if (is_of_one) return datasets_[members.front()]->collate(samples, options);
  std::vector<Batch> rows;
  for (size_t i = 0; i < samples.size(); ++i) rows.push_back(datasets_[members[i]]->collate({samples[i]}, options));
  check_alike(rows);
  return concatenate(std::move(rows), options.pin_memory);
}

const std::string& BlendedDataset::source_of(int64_t index) const {
  const auto dataset = static_cast<size_t>(dataset_index_.at(static_cast<size_t>(index)));
  return datasets_[dataset]->source_of(sample_index_[static_cast<size_t>(index)]);
}

std::string BlendedDataset::parts_of(int64_t index) const {
  const auto dataset = static_cast<size_t>(dataset_index_.at(static_cast<size_t>(index)));
  return datasets_[dataset]->parts_of(sample_index_[static_cast<size_t>(index)]);
}

bool BlendedDataset::has_labels() const {
  return std::ranges::any_of(datasets_, [](const auto& each) { return each->has_labels(); });
}

void BlendedDataset::add_facts(int64_t samples, DatasetFacts& facts) const {
  const double share = static_cast<double>(samples) / static_cast<double>(size());
  for (size_t i = 0; i < datasets_.size(); ++i) {
    const auto drawn = std::llround(static_cast<double>(counts_[i]) * share);
    datasets_[i]->add_facts(drawn, facts);
  }
}

}  // namespace megashard
