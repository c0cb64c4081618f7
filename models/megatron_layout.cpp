#include "models/megatron_layout.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/argument_validation.h"
#include "models/network_arguments.h"

namespace megashard {
namespace {

using Sizes = std::vector<int64_t>;

class LayoutBuilder {
 public:
  LayoutBuilder(const DecoderConfig& config, int64_t vocab_divisor)
      : config_(config), padded_vocab_(padded_vocab_size(config.vocab_size, vocab_divisor, 1)) {}

  MegatronLayout build() {
    add_vocabulary("embedding.word_embeddings.weight", std::string("model.") + kEmbeddingsWeight);
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) add_layer(layer);
    add("decoder.final_layernorm.weight", "model.norm.weight", {config_.hidden_size});
    if (!config_.tie_word_embeddings) add_vocabulary("output_layer.weight", kHeadWeight);
    layout_.stateful_modules.push_back("decoder.final_layernorm");
    layout_.arguments = network_arguments(config_);
    layout_.arguments.set("padded_vocab_size", padded_vocab_);
    return std::move(layout_);
  }

 private:
  void add_group(std::vector<WeightGroup::Member> tensors, std::vector<WeightPart> parts) {
    layout_.weights.groups.push_back({std::move(tensors), {{"megatron", std::move(parts)}}});
  }

  /// One weight for one.
  void add(const std::string& name, const std::string& source, const Sizes& sizes) {
    add_group({{source, sizes}}, {whole_part(source, name, sizes)});
  }

  void add_vocabulary(const std::string& name, const std::string& source) {
    auto part = rows_part(source, 0, config_.vocab_size, name, {padded_vocab_, config_.hidden_size}, 0);
    part.padded = true;
    add_group({{source, {config_.vocab_size, config_.hidden_size}}}, {std::move(part)});
  }

  void add_layer(int64_t layer) {
    const auto ours = "model.layers." + std::to_string(layer) + ".";
    const auto theirs = "decoder.layers." + std::to_string(layer) + ".";
    const auto hidden = config_.hidden_size;
    const auto heads = config_.num_heads * config_.head_dim;
    const auto attention = theirs + "self_attention.";
    add(attention + "linear_qkv.layer_norm_weight", ours + "input_layernorm.weight", {hidden});
    add_qkv(attention + "linear_qkv.", ours + "self_attn.");
    if (config_.qk_norm) {
      add(attention + "q_layernorm.weight", ours + "self_attn.q_norm.weight", {config_.head_dim});
      add(attention + "k_layernorm.weight", ours + "self_attn.k_norm.weight", {config_.head_dim});
    }
    add(attention + "linear_proj.weight", ours + "self_attn.o_proj.weight", {hidden, heads});
    if (config_.attention_out_bias) add(attention + "linear_proj.bias", ours + "self_attn.o_proj.bias", {hidden});
    add(theirs + "mlp.linear_fc1.layer_norm_weight", ours + "post_attention_layernorm.weight", {hidden});
    add_gate_and_up(theirs + "mlp.linear_fc1.", ours + "mlp.");
    add(theirs + "mlp.linear_fc2.weight", ours + "mlp.down_proj.weight", {hidden, config_.intermediate_size});
    if (config_.mlp_bias) add(theirs + "mlp.linear_fc2.bias", ours + "mlp.down_proj.bias", {hidden});
    for (const char* module : {"self_attention.linear_proj", "self_attention.linear_qkv",
                               "self_attention.core_attention", "mlp.linear_fc1", "mlp.linear_fc2"})
      layout_.stateful_modules.push_back(theirs + module);
    if (!config_.qk_norm) return;
    layout_.stateful_modules.push_back(attention + "q_layernorm");
    layout_.stateful_modules.push_back(attention + "k_layernorm");
  }

  void add_qkv(const std::string& name, const std::string& prefix) {
    const std::string projections[] = {prefix + "q_proj.", prefix + "k_proj.", prefix + "v_proj."};
    const auto groups = config_.num_kv_heads;
    const auto key_rows = config_.head_dim;
    const int64_t rows[] = {config_.num_heads / groups * key_rows, key_rows, key_rows};  // of a group
    add_with_bias(config_.qkv_bias, [&](const std::string& kind, const auto& sizes) {
      std::vector<WeightGroup::Member> tensors;
      for (size_t i = 0; i < 3; ++i) tensors.push_back({projections[i] + kind, sizes(groups * rows[i])});
      std::vector<WeightPart> parts;
      int64_t row = 0;
      for (int64_t group = 0; group < groups; ++group) {
        for (size_t i = 0; i < 3; ++i) {
          parts.push_back(rows_part(projections[i] + kind, group * rows[i], rows[i], name + kind,
                                    sizes(groups * (rows[0] + 2 * key_rows)), row));
          row += rows[i];
        }
      }
      add_group(std::move(tensors), std::move(parts));
    });
  }

  void add_gate_and_up(const std::string& name, const std::string& prefix) {
    const auto rows = config_.intermediate_size;
    add_with_bias(config_.mlp_bias, [&](const std::string& kind, const auto& sizes) {
      const auto gate = prefix + "gate_proj." + kind, up = prefix + "up_proj." + kind, both = name + kind;
      add_group({{gate, sizes(rows)}, {up, sizes(rows)}}, {rows_part(gate, 0, rows, both, sizes(2 * rows), 0),
                                                           rows_part(up, 0, rows, both, sizes(2 * rows), rows)});
    });
  }

  /// Calls `add` for the weight of a linear with hidden_size inputs, and for its bias, which has the same rows.
  /// `sizes`: of a tensor with that many rows.
  template <class Add>
  void add_with_bias(bool has_bias, const Add& add) {
    add("weight", [&](int64_t rows) { return Sizes{rows, config_.hidden_size}; });
    if (has_bias) add("bias", [](int64_t rows) { return Sizes{rows}; });
  }

  const DecoderConfig& config_;
  int64_t padded_vocab_;
  MegatronLayout layout_;
};

}  // namespace

MegatronLayout megatron_layout(const DecoderConfig& config, int64_t vocab_divisor) {
  TORCH_CHECK(vocab_divisor > 0, "--make-vocab-size-divisible-by must be positive, got ", vocab_divisor);
  TORCH_CHECK(config.gated_mlp && config.norm == NormKind::kRmsNorm && config.positions == PositionKind::kRotary,
              "--megatron-layout knows networks with RMSNorm, rotary positions and a gated MLP");
  using Kind = RotaryConfig::Kind;
  const auto kind = config.rotary.kind;
  TORCH_CHECK(kind == Kind::kDefault || kind == Kind::kLinear || kind == Kind::kLlama3,
              "--megatron-layout knows positions of rope_type default, linear and llama3: convert without it");
  TORCH_CHECK(config.sliding_layers.empty() || config.sliding_window >= config.max_positions,
              "--megatron-layout knows no sliding windows (sliding_window ", config.sliding_window,
              " in config.json): convert without it");
  TORCH_CHECK(config.moe.num_experts == 0, "--megatron-layout knows no networks with experts: convert without it");
  TORCH_CHECK(config.attention_out_bias == config.mlp_bias,
              "Megatron has one switch, --add-bias-linear, for the biases of o_proj and of the MLP: a model with only "
              "one of them (attention_bias ",
              config.attention_out_bias, ", mlp_bias ", config.mlp_bias, " in config.json) has no Megatron layout");
  return LayoutBuilder(config, vocab_divisor).build();
}

}  // namespace megashard
