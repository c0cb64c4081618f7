#include "framework/data/prime_rollouts.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

namespace megashard {
namespace {

using P = PrimeRollouts;

constexpr const char* kFieldNames[P::kFields] = {
    "input_ids",         "loss_mask",  "advantages", "inference_logprobs", "position_ids",   "sequence_lengths",
    "temperatures",      "env_names",  "seq_lens",   "ref_logprobs",       "routed_experts", "mm_kwargs",
    "mm_token_type_ids", "rl_weights", "ce_weights", "ref_kl_weights"};
constexpr int kFirstOptional = P::kRefLogprobs;

struct NamedField {
  P::Field field;
  const char* name;
};
/// Columns of a batch, one number for a token.
constexpr NamedField kColumns[] = {{P::kAdvantages, "advantages"},     {P::kInferenceLogprobs, "infer_logprobs"},
                                   {P::kRefLogprobs, "ref_log_probs"}, {P::kRlWeights, "rl_weights"},
                                   {P::kCeWeights, "ce_weights"},      {P::kRefKlWeights, "ref_kl_weights"}};

/// Takes a file's values one by one; nothing nests deeper than the list of a field.
class Reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Reader(std::vector<P::MicroBatch>& into) : into_(into) {}

  bool null() override { return depth_ == 2 ? begin_field() : wrong(); }
  bool boolean(bool value) override { return number(value ? 1 : 0); }
  bool number_integer(number_integer_t value) override { return number(static_cast<double>(value)); }
  bool number_unsigned(number_unsigned_t value) override { return number(static_cast<double>(value)); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return number(value); }
  bool string(string_t& /*value*/) override { return depth_ == 3 && field_ == P::kEnvNames ? true : wrong(); }
  bool binary(binary_t& /*value*/) override { return wrong(); }
  bool start_object(std::size_t /*elements*/) override { return depth_ == 2 && begin_field() ? refuse() : wrong(); }
  bool key(string_t& /*value*/) override { return wrong(); }
  bool end_object() override { return wrong(); }
  bool start_array(std::size_t /*elements*/) override {
    if (depth_ == 3) return wrong();
    if (depth_ == 2) {
      if (!begin_field()) return false;
      if (field_ == P::kRoutedExperts || field_ == P::kMmTokenTypeIds) return refuse();
    }
    if (++depth_ != 2) return true;
    into_.emplace_back();
    field_ = -1;
    return true;
  }
  bool end_array() override {
    if (depth_-- == 2 && field_ < kFirstOptional - 1) return wrong();
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*token*/, const nlohmann::detail::exception&) override {
    error_ = c10::str("byte ", position, " is no msgpack of micro batches; the file is damaged");
    return false;
  }

  const std::string& error() const { return error_; }

 private:
  bool number(double value) {
    if (depth_ != 3 || field_ == P::kEnvNames) return wrong();
    into_.back()[static_cast<size_t>(field_)].push_back(value);
    return true;
  }
  bool begin_field() { return ++field_ < P::kFields ? true : wrong(); }
  bool refuse() {
    error_ = c10::str("micro batch ", into_.size(), " has ", kFieldNames[field_],
                      ": pictures and router replay are not trained here from rollouts; let the orchestrator leave "
                      "them out");
    return false;
  }
  bool wrong() {
    error_ = c10::str("micro batch ", into_.size(), " is not an array of prime-rl's fields",
                      field_ >= 0 && field_ < P::kFields ? c10::str(" at ", kFieldNames[field_]) : "",
                      "; does the orchestrator have another version?");
    return false;
  }

  std::vector<P::MicroBatch>& into_;
  int depth_ = 0, field_ = -1;
  std::string error_;
};

/// Entries 1, 2, ... of the field, then zeros.
void write_shifted(const std::vector<double>& values, const at::Tensor& row) {
  auto* to = row.mutable_data_ptr<float>();
  std::transform(values.begin() + 1, values.end(), to, [](double value) { return static_cast<float>(value); });
}

}  // namespace

PrimeRollouts::PrimeRollouts(std::string path) : path_(std::move(path)) {
  std::ifstream file(path_, std::ios::binary);
  TORCH_CHECK(file.good(), "cannot read ", path_);
  Reader reader(micro_batches_);
  const bool is_whole = nlohmann::json::sax_parse(file, &reader, nlohmann::json::input_format_t::msgpack);
  TORCH_CHECK(is_whole, path_, ": ", reader.error());
  TORCH_CHECK(!micro_batches_.empty(), path_,
              " has no micro batch; a rank without answers needs one whose loss_mask is "
              "false everywhere");
  for (size_t i = 0; i < micro_batches_.size(); ++i) check(micro_batches_[i], i);
}

void PrimeRollouts::check(const MicroBatch& each, size_t index) const {
  const auto where = [&] { return c10::str(path_, ": micro batch ", index + 1); };
  const size_t tokens = each[kInputIds].size();
  TORCH_CHECK(tokens > 1, where(), " has ", tokens, " tokens; it must have 2 or more");
  for (const Field field : {kLossMaskField, kAdvantages, kInferenceLogprobs, kPositions, kTemperatures, kRefLogprobs,
                            kRlWeights, kCeWeights, kRefKlWeights}) {
    const size_t size = each[field].size();
    TORCH_CHECK(size == tokens || (size == 0 && field >= kFirstOptional), where(), " has ", size, " values of ",
                kFieldNames[field], " for ", tokens, " tokens");
  }
  constexpr double kMost = 1 << 30;
  for (const Field field : {kInputIds, kPositions, kSeqLens}) {
    const auto is_count = [](double value) { return value >= 0 && value < kMost && value == std::floor(value); };
    TORCH_CHECK(std::ranges::all_of(each[field], is_count), where(), " has ", kFieldNames[field],
                " that are no whole numbers from 0 on");
  }
  const auto& lengths = each[kSeqLens];
  const bool are_positive = std::ranges::all_of(lengths, [](double length) { return length > 0; });
  TORCH_CHECK(are_positive && std::reduce(lengths.begin(), lengths.end()) == static_cast<double>(tokens), where(),
              ": seq_lens must add up to its ", tokens, " tokens");
  TORCH_CHECK(std::ranges::all_of(each[kTemperatures], [](double value) { return value > 0; }), where(),
              " has a temperature that is not positive");
}

Batch PrimeRollouts::collate(const std::vector<int64_t>& indices, const BatchOptions& options) const {
  TORCH_CHECK(indices.size() == 1, "a micro batch of rollouts is one row; set --micro-batch-size 1");
  const MicroBatch& from = micro_batches_.at(static_cast<size_t>(indices.front()));
  const auto count = std::ssize(from[kInputIds]);
  TORCH_CHECK(count <= options.seq_length, path_, ": micro batch ", indices.front() + 1, " has ", count,
              " tokens, more than --seq-length ", options.seq_length, "; raise it to the orchestrator's seq_len");
  const int64_t length = (count + options.length_multiple - 1) / options.length_multiple * options.length_multiple;
  const auto zeros = [&](at::ScalarType type) {
    return at::zeros({1, length}, at::TensorOptions(type).pinned_memory(options.pin_memory));
  };
  const std::vector<int64_t> tokens(from[kInputIds].begin(), from[kInputIds].end());
  check_tokens(tokens, indices.front(), options);
  Batch batch;
  batch.set(kTokens, zeros(at::kLong));
  batch.set(kPositionIds, zeros(at::kLong));
  batch.set(kLabels, zeros(at::kLong));
  batch.set(kTokenMask, zeros(at::kBool));
  batch.set(kLossMask, zeros(at::kFloat), Axis::kToken, /*is_input=*/false);
  std::ranges::copy(tokens, batch.tokens().mutable_data_ptr<int64_t>());
  std::copy(tokens.begin() + 1, tokens.end(), batch.labels().mutable_data_ptr<int64_t>());
  std::ranges::copy(from[kPositions], batch.position_ids().mutable_data_ptr<int64_t>());
  std::fill_n(batch.token_mask().mutable_data_ptr<bool>(), count, true);
  write_shifted(from[kLossMaskField], batch.at(kLossMask));
  for (const auto& [field, name] : kColumns) {
    if (from[field].empty()) continue;
    batch.set(name, zeros(at::kFloat), Axis::kToken, /*is_input=*/false);
    write_shifted(from[field], batch.at(name));
  }
  if (std::ranges::any_of(from[kTemperatures], [](double value) { return value != 1; })) {
    batch.set(kLogitTemperatures, zeros(at::kFloat));
    std::ranges::copy(from[kTemperatures], batch.at(kLogitTemperatures).mutable_data_ptr<float>());
  }
  std::vector<int64_t> documents(from[kSeqLens].begin(), from[kSeqLens].end());
  if (count < length) documents.push_back(length - count);
  batch.document_lengths = at::tensor(documents, at::kLong);
  return batch;
}

void PrimeRollouts::add_facts(int64_t /*samples*/, DatasetFacts& facts) const {
  facts.has_fixed_length = false;
  for (const MicroBatch& each : micro_batches_) facts.tokens += std::ssize(each[kInputIds]);
}

}  // namespace megashard
