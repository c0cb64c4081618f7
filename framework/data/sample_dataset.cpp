#include "framework/data/sample_dataset.h"

#include <c10/util/Exception.h>

#include <algorithm>

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

}  // namespace megashard
