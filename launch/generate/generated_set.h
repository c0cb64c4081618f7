#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// Prompts with sampled answers, as a set of conversations (framework/data/conversation_dataset.h): loss_mask is 1 for
/// the answers' tokens, and column.infer_logprobs has their log-probabilities, 0 for those of prompts.
/// column.temperatures, by which a training divides its logits, too, is there unless the temperature is 0 or 1.
class GeneratedSet {
 public:
  explicit GeneratedSet(double temperature) : temperature_(temperature) {}

  /// `answer` int64 and `log_probs` fp32, [tokens] on the CPU.
  void add(const std::vector<int64_t>& prompt, const at::Tensor& answer, const at::Tensor& log_probs);
  /// Writes the file, which appears whole.
  void write(const std::string& path) const;
  int64_t answer_tokens() const { return answer_tokens_; }

 private:
  double temperature_;
  std::vector<int32_t> tokens_;
  std::vector<uint8_t> loss_mask_;
  std::vector<float> log_probs_;
  std::vector<int64_t> ends_;  // of the conversations
  int64_t answer_tokens_ = 0;
};

}  // namespace megashard
