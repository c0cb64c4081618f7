#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/config/decoder_config.h"
#include "parallel/fsdp/hooked_module.h"
#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Cosines and sines of the angles, computed once per forward and shared by all layers. Undefined: no rotation.
struct RotaryTables {
  at::Tensor cos;  // [T, R/2] or [B, T, R/2]
  at::Tensor sin;

  template <class F>
  void visit_tensors(F&& f) {
    f(cos);
    f(sin);
  }
};

/// Rotary embedding. It has no parameters or buffers: the frequencies follow from the configuration, so nothing is
/// stored, sharded or materialised. Frequencies, and tables of the positions 0 .. T-1, are cached on the device.
class RotaryEmbedding : public torch::nn::Module {
 public:
  RotaryEmbedding(std::string class_name, int64_t head_dim, const RotaryConfig& rotary);

  /// Tables with the dtype and device of `hidden`; position_ids [B, T], with M-RoPE also [3, B, T] (time, height,
  /// width), or undefined for 0 .. length-1. `length` is that of the sequence, on which frequencies may depend
  /// (depends_on_length). `end` [] int64, with position_ids: the maximum of the whole batch plus one.
  RotaryTables forward(const at::Tensor& hidden, const at::Tensor& position_ids, int64_t length,
                       const at::Tensor& end = {});
  bool depends_on_length() const { return config_.depends_on_length(); }
  std::string class_name() const { return class_name_; }

 private:
  at::Tensor frequencies(const at::Tensor& end) const;
  RotaryTables tables(const at::Tensor& positions, const at::Tensor& hidden, const at::Tensor& end);

  std::string class_name_;
  RotaryConfig config_;
  int64_t rotary_dim_;
  std::vector<int64_t> axis_of_pair_;  // M-RoPE: the position id for each channel pair
  // On the device of the last forward.
  at::Tensor frequencies_, long_frequencies_, exponents_, axes_;
  RotaryTables cached_;
};

/// 1 / (theta^(2 i / R)), scaled by the configuration; [R/2] fp32 on the CPU. For short sequences, if the length
/// matters.
at::Tensor inverse_frequencies(const RotaryConfig& config, int64_t rotary_dim);

/// Packed documents in the rows of a batch; attention does not cross them.
struct Documents {
  std::vector<int64_t> lengths;  ///< of all rows, concatenated; each row starts a document
  int64_t longest = 0;           ///< maximum of the lengths
  at::Tensor ends;               ///< without ring on GPUs: [documents + 1] int32: 0, then the end of each in all rows
  at::Tensor begins;             ///< with a ring and on CPUs: [B, T] int64, the start of a token's document in its row

  /// [B, T] int64 on the device: the start of each token's document in its row. Does not block the host.
  at::Tensor token_begins(int64_t rows, int64_t length, c10::Device device) const;

  /// From Batch::document_lengths, for `rows` rows of `length` tokens, which a ring shards. Does not block the host.
  /// Null without lengths; throws if they do not add up to the rows.
  static std::shared_ptr<const Documents> of(const at::Tensor& lengths, int64_t rows, int64_t length, bool in_ring,
                                             c10::Device device);
};

/// Batch::document_lengths of documents cut into pieces of at most `chunk` tokens. `lengths` may be undefined: each of
/// the `rows` rows of `length` tokens is a document.
at::Tensor chunked_lengths(const at::Tensor& lengths, int64_t rows, int64_t length, int64_t chunk);

/// QueryTemperature at `positions` [...], in fp32.
at::Tensor query_factors(const QueryTemperature& temperature, const at::Tensor& positions);

/// Keys that a layer's queries see: up to their own (or key_ends), of their document, within the window.
struct KeySpan {
  SequenceShard sequence{};                      // positions of the rows of [B, T]
  std::shared_ptr<const Documents> documents{};  // null: one per row
  int64_t window = 0;                            // number of keys up to the query's own, with it; 0: all
  at::Tensor key_ends{};  // [B, T] int64 of the whole sequence: behind the last key; undefined: one's own is the last
};

/// Keys and values [B, T, G, D] of this rank's rows, which later layers take.
struct SharedKeys {
  at::Tensor keys{}, values{};
  size_t place = 0;  ///< in Pass::shared_keys

  template <class F>
  void visit_tensors(F&& f) {
    f(keys);
    f(values);
  }
};

class KeyCache;

/// Inputs that all layers of one forward share.
struct Pass {
  c10::SmallVector<RotaryTables, 2> rotary{};  ///< of Network::rotaries, in their order
  at::Tensor token_mask{};                     ///< see Batch
  KeySpan span{};                              ///< without a window, which is a layer's own
  std::shared_ptr<const Documents> chunks{};   ///< pieces of span's documents, for layers with chunks
  at::Tensor query_factors{};                  ///< [T] or [B, T]: multiply a token's queries; undefined: do not
  std::array<SharedKeys, 2> shared_keys{};     ///< given so far: [0] without a window, [1] with one
  at::Tensor layer_inputs{};                   ///< [B, T, layers, P] (LayerInputs); undefined: none
  std::shared_ptr<KeyCache> cache{};           ///< keeps keys and values for later tokens; null: nothing does

  template <class F>
  void visit_tensors(F&& f) {
    for (auto& tables : rotary) tables.visit_tensors(f);
    f(token_mask);
    f(query_factors);
    for (auto& each : shared_keys) each.visit_tensors(f);
    f(layer_inputs);
  }
};

/// Output of a part, a layer or a stack of layers: hidden states and statistics of the routers on their way.
struct LayerOutput {
  at::Tensor hidden;  ///< [B, T, C]
  /// One layer: [2, B, experts] fp32; several: [layers, 2, B, experts]. The number of tokens of each sequence that
  /// chose each expert, and the sum of the tokens' probabilities for it, which has a gradient. Masked tokens count for
  /// neither. Undefined without router losses.
  at::Tensor balance{};
  /// Squared logsumexp of the router logits, summed over the same tokens; one layer: a scalar; several: [layers] fp32.
  /// Undefined without a z-loss.
  at::Tensor z{};
  SharedKeys given{};  ///< of one layer, for later ones; undefined: none

  template <class F>
  void visit_tensors(F&& f) {
    f(hidden);
    f(balance);
    f(z);
    given.visit_tensors(f);
  }
};

/// A module in a residual branch of a layer: attention, MLP, experts.
class Part {
 public:
  virtual ~Part() = default;
  virtual LayerOutput run(const at::Tensor& normed, const Pass& pass) = 0;  // [B, T, C]
  virtual std::shared_ptr<torch::nn::Module> module() = 0;
};

/// Hooked<M> as a Part. M::forward takes (hidden) or (hidden, pass), and returns hidden states or a LayerOutput.
template <class M>
class PartOf final : public Hooked<M>, public Part {
 public:
  using Hooked<M>::Hooked;

  LayerOutput run(const at::Tensor& normed, const Pass& pass) override {
    if constexpr (requires { this->forward(normed, pass); }) {
      return output(this->forward(normed, pass));
    } else {
      return output(this->forward(normed));
    }
  }
  std::shared_ptr<torch::nn::Module> module() override { return this->shared_from_this(); }

 private:
  static LayerOutput output(LayerOutput result) { return result; }
  static LayerOutput output(at::Tensor hidden) { return {.hidden = std::move(hidden)}; }
};

}  // namespace megashard
