#include "models/layers/latent_attention.h"

#include <ATen/ops/cat.h>

#include <tuple>
#include <utility>
#include <vector>

#include "framework/mistakes.h"
#include "models/kernels/fused_ops.h"
#include "models/layers/cached_attention.h"
#include "models/layers/key_cache.h"
#include "parallel/sequence_parallel/ulysses.h"

namespace megashard {
namespace {

class LatentAttentionPart final : public PartSpec {
 public:
  explicit LatentAttentionPart(LatentAttentionSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& context) const override {
    return std::make_shared<PartOf<LatentAttention>>(spec_, context);
  }
  /// Counts projections, and scores of half of the sequence on average.
  double training_flops(int64_t sequence_length) const override {
    const int64_t keys = spec_.num_heads * spec_.key_dim(), values = spec_.num_heads * spec_.value_dim;
    const int64_t of_queries =
        spec_.query_rank == 0 ? spec_.hidden_size * keys : spec_.query_rank * (spec_.hidden_size + keys);
    const int64_t of_keys = spec_.hidden_size * (spec_.key_rank + spec_.rotated_dim) +
                            spec_.key_rank * (spec_.num_heads * spec_.plain_dim + values);
    return 6.0 * static_cast<double>(of_queries + of_keys + values * spec_.hidden_size) +
           3.0 * static_cast<double>(keys + values) * static_cast<double>(sequence_length);
  }
  std::vector<SharedSize> sizes_over_ranks() const override { return {{spec_.num_heads, "attention heads"}}; }
  void check_sequence_ranks(const std::string& model, int64_t ranks, int64_t tensor_parallel) const override {
    const int64_t heads = spec_.num_heads / tensor_parallel;
    check_ulysses_heads(model, heads, heads, ranks);
  }
  void check_sequence_ring(const std::string& model) const override {
    require_no_dropout_in_ring(model, spec_.dropout);
  }
  std::vector<std::string> paths_of(const std::string& megatron_part) const override {
    if (megatron_part == "core_attn") return {"core_attention"};
    if (megatron_part == "attn_proj") return {"o_proj"};
    if (megatron_part != "qkv_linear") return {};
    if (spec_.query_rank == 0) return {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj"};
    return {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"};
  }
  bool continues_from_cache() const override { return true; }
  std::string norm_before() const override { return "attn_norm"; }

 private:
  LatentAttentionSpec spec_;
};

}  // namespace

PartSpecPtr latent_attention_part(LatentAttentionSpec spec) {
  return std::make_shared<LatentAttentionPart>(std::move(spec));
}

LatentAttention::LatentAttention(const LatentAttentionSpec& spec, const BuildContext& context)
    : spec_(spec), ranks_(context.tensor_parallel), num_heads_(spec.num_heads / ranks_->size()) {
  const auto to_latent = [&](const char* name, int64_t out) {
    const Linear::Options options{.in = spec.hidden_size, .out = out, .bias = spec.latent_bias};
    return register_module(name, std::make_shared<Hooked<ReplicatedLinear>>(options, ranks_));
  };
  const auto norm = [&](const char* name, int64_t width) -> std::shared_ptr<Hooked<Norm>> {
    if (!spec.norm) return nullptr;
    auto of_latent = *spec.norm;
    of_latent.width = width;
    return register_module(name, std::make_shared<Hooked<Norm>>(std::move(of_latent), ranks_));
  };
  const auto to_heads = [&](const char* name, int64_t in, int64_t channels) {
    const Linear::Options options{.in = in, .out = spec.num_heads * channels};
    return register_module(name, std::make_shared<Hooked<ColumnParallelLinear>>(options, ranks_));
  };
  if (spec.query_rank == 0) {
    q_proj_ = to_heads("q_proj", spec.hidden_size, spec.key_dim());
  } else {
    q_a_proj_ = to_latent("q_a_proj", spec.query_rank);
    q_a_layernorm_ = norm("q_a_layernorm", spec.query_rank);
    q_proj_ = to_heads("q_b_proj", spec.query_rank, spec.key_dim());
  }
  kv_a_proj_ = to_latent("kv_a_proj_with_mqa", spec.key_rank + spec.rotated_dim);
  kv_a_layernorm_ = norm("kv_a_layernorm", spec.key_rank);
  kv_b_proj_ = to_heads("kv_b_proj", spec.key_rank, spec.plain_dim + spec.value_dim);
  const Linear::Options options{.in = spec.num_heads * spec.value_dim,
                                .out = spec.hidden_size,
                                .bias = spec.out_bias,
                                .init_scale = spec.output_init_scale};
  o_proj_ = register_module("o_proj", std::make_shared<Hooked<RowParallelLinear>>(options, ranks_));
  core_attention_ =
      register_module("core_attention", std::make_shared<Hooked<CoreAttention>>(spec.dropout, spec.scale));
}

at::Tensor LatentAttention::query_latent(const at::Tensor& own) const {
  if (!q_a_proj_) return own;
  const auto latent = q_a_proj_->forward(own);
  return q_a_layernorm_ ? q_a_layernorm_->forward(latent) : latent;
}

std::vector<at::Tensor> LatentAttention::heads_of(const at::Tensor& own, const RotaryTables& rotary) const {
  const auto heads = [this](const at::Tensor& x) { return x.unflatten(2, {num_heads_, -1}); };
  const auto turned = [&](const at::Tensor& x) {
    if (!spec_.rotary) return x;
    return rotate(spec_.neighbours ? neighbours_to_halves(x, spec_.rotated_dim) : x, rotary.cos, rotary.sin);
  };
  const auto latent = kv_a_proj_->forward(own).split_with_sizes({spec_.key_rank, spec_.rotated_dim}, -1);
  const auto of_keys = kv_a_layernorm_ ? kv_a_layernorm_->forward(latent[0]) : latent[0];
  const auto queries = heads(q_proj_->forward(ranks_->enter(query_latent(own))))
                           .split_with_sizes({spec_.plain_dim, spec_.rotated_dim}, -1);
  const auto keys =
      heads(kv_b_proj_->forward(ranks_->enter(of_keys))).split_with_sizes({spec_.plain_dim, spec_.value_dim}, -1);
  const auto shared_key = turned(ranks_->enter(latent[1]).unsqueeze(2)).expand({-1, -1, num_heads_, -1});
  return {at::cat({queries[0], turned(queries[1])}, -1), at::cat({keys[0], shared_key}, -1), keys[1]};
}

at::Tensor LatentAttention::forward(const at::Tensor& own, const Pass& pass) {
  const SequenceShard rows = pass.span.sequence.of_place();
  auto heads = heads_of(own, spec_.rotary ? pass.rotary[*spec_.rotary] : RotaryTables());
  if (spec_.query_factors) heads[0] = scale_queries(heads[0], pass.query_factors);
  if (pass.cache) std::tie(heads[1], heads[2]) = pass.cache->add(this, heads[1], heads[2]);
  if (pass.cache && !pass.cache->is_first()) {
    const CachedKeys cached{heads[1], heads[2], pass.cache->places()};
    return o_proj_->forward(core_attention_->forward_cached(heads[0], cached, at::Tensor()).flatten(2));
  }
  const auto whole = gather_sequence({heads[0], heads[1]}, rows);
  const auto values = gather_sequence({heads[2]}, rows)[0];  // one exchange takes tensors of one width
  const auto mixed = core_attention_->forward(whole[0], whole[1], values, pass.span, at::Tensor());
  return o_proj_->forward(scatter_sequence(mixed, rows).flatten(2));
}

}  // namespace megashard
