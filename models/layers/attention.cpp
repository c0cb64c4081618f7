#include "models/layers/attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "framework/mistakes.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/row_layout.h"
#include "models/layers/cached_attention.h"
#include "models/layers/causal_attention.h"
#include "models/layers/fused_forms.h"
#include "models/layers/key_cache.h"
#include "parallel/sequence_parallel/ring_attention.h"
#include "parallel/sequence_parallel/ulysses.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
namespace {

class AttentionPart final : public PartSpec {
 public:
  explicit AttentionPart(AttentionSpec spec) : spec_(std::move(spec)) {}

  std::shared_ptr<Part> build(const BuildContext& context) const override {
    return std::make_shared<PartOf<Attention>>(spec_, context);
  }
  /// Four projections, then the scores: of a query on average half of the sequence, or the keys in its window.
  double training_flops(int64_t sequence_length) const override {
    const auto hidden = static_cast<double>(spec_.hidden_size), heads = static_cast<double>(spec_.num_heads),
               groups = static_cast<double>(spec_.num_kv_heads), length = static_cast<double>(sequence_length);
    const double window = spec_.window > 0 ? std::min(static_cast<double>(spec_.window), length) : length;
    const double chunk = spec_.chunk > 0 ? std::min(static_cast<double>(spec_.chunk), length) : 0;
    const double keys = chunk > 0 ? chunk / 2 : window - window * window / (2.0 * length);
    const double gate = spec_.output_gate ? hidden / 2 : 0;
    const double projections = spec_.sharing == AttentionSpec::Sharing::kTake ? 0 : spec_.values_are_keys ? 0.5 : 1;
    return 12.0 * static_cast<double>(spec_.head_dim) * heads *
           (hidden + gate + projections * hidden * groups / heads + keys);
  }
  std::vector<SharedSize> sizes_over_ranks() const override {
    return {{spec_.num_heads, "attention heads"}, {spec_.num_kv_heads, "key and value heads"}};
  }
  void check_sequence_ranks(const std::string& model, int64_t ranks, int64_t tensor_parallel) const override {
    check_ulysses_heads(model, spec_.num_heads / tensor_parallel, spec_.num_kv_heads / tensor_parallel, ranks);
  }
  void check_tensor_ranks(const std::string& model) const override {
    require(!spec_.norms_all_heads,
            model + " norms the queries and keys of all heads together, which --tensor-model-parallel-size would cut; "
                    "leave it out.");
  }
  void check_sequence_ring(const std::string& model) const override {
    require_no_dropout_in_ring(model, spec_.dropout);
    require(spec_.softcap == 0, model + " caps the scores of attention, and ring attention does not; give "
                                        "--context-parallel-algo ulysses_cp_algo.");
  }
  std::vector<std::string> paths_of(const std::string& megatron_part) const override {
    if (megatron_part == "core_attn") return {"core_attention"};
    if (megatron_part == "qkv_linear") {
      if (spec_.sharing == AttentionSpec::Sharing::kTake) return {"q_proj"};
      return spec_.values_are_keys ? std::vector<std::string>{"q_proj", "k_proj"}
                                   : std::vector<std::string>{"q_proj", "k_proj", "v_proj"};
    }
    return megatron_part == "attn_proj" ? std::vector<std::string>{"o_proj"} : std::vector<std::string>{};
  }
  std::vector<WeightGroup> weight_forms(const std::string& path, const WeightFiles& files) const override {
    if (files.fused.qkv.empty()) return {};
    const int64_t keys = spec_.num_kv_heads * spec_.head_dim;
    const int64_t queries = spec_.num_heads * spec_.head_dim * (spec_.output_gate ? 2 : 1);
    return {fused_forms(path, {{"q_proj", queries}, {"k_proj", keys}, {"v_proj", keys}}, files.fused.qkv,
                        spec_.hidden_size, spec_.qkv_bias)};
  }
  bool continues_from_cache() const override { return true; }
  std::string norm_before() const override { return "attn_norm"; }

 private:
  AttentionSpec spec_;
};

}  // namespace

void require_no_dropout_in_ring(const std::string& model, double dropout) {
  require(dropout == 0,
          c10::str(model, " has an attention dropout of ", dropout,
                   ", and ring attention has none; give --attention-dropout 0 (in config.json attention_dropout), or "
                   "--context-parallel-algo ulysses_cp_algo."));
}

at::Tensor neighbours_to_halves(const at::Tensor& x, int64_t dims) {
  const auto halves = x.narrow(3, 0, dims).unflatten(3, {dims / 2, 2}).transpose(3, 4).flatten(3);
  return dims == x.size(3) ? halves : at::cat({halves, x.narrow(3, dims, x.size(3) - dims)}, 3);
}

at::Tensor scale_queries(const at::Tensor& q, const at::Tensor& factors) {
  return (q * factors.unsqueeze(-1).unsqueeze(-1)).to(q.scalar_type());
}

PartSpecPtr attention_part(AttentionSpec spec) { return std::make_shared<AttentionPart>(std::move(spec)); }

at::Tensor CoreAttention::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                                  const at::Tensor& sinks) {
  const int64_t missing = q.size(3) - v.size(3);
  if (missing > 0) return forward(q, k, at::constant_pad_nd(v, {0, missing}), span, sinks).narrow(3, 0, v.size(3));
  if (span.sequence.ring) {
    TORCH_CHECK(softcap_ == 0, "ring attention does not cap scores");
    const bool by_fp32 = by_way_of_fp32(q);
    const auto computed = [&](const at::Tensor& x) { return by_fp32 ? x.to(at::kFloat) : x; };
    const RingMask mask{.document_begins = span.documents ? span.documents->begins : at::Tensor(),
                        .window = span.window};
    return ring_attention(computed(q), computed(k), computed(v), mask, scale_, span.sequence).to(q.scalar_type());
  }
  return causal_attention(
      q, k, v, span, {.dropout = is_training() ? dropout_ : 0.0, .scale = scale_, .softcap = softcap_, .sinks = sinks});
}

at::Tensor CoreAttention::forward_cached(const at::Tensor& q, const CachedKeys& keys, const at::Tensor& sinks) const {
  return cached_attention(q, keys, {.scale = scale_, .softcap = softcap_, .sinks = sinks});
}

Attention::Attention(const AttentionSpec& spec, const BuildContext& context)
    : class_name_(spec.class_name),
      ranks_(context.tensor_parallel),
      num_heads_(spec.num_heads / ranks_->size()),
      num_kv_heads_(spec.num_kv_heads / ranks_->size()),
      head_dim_(spec.head_dim),
      rotary_(spec.rotary),
      rotary_interleaved_(spec.rotary_interleaved),
      norms_all_heads_(spec.norms_all_heads),
      norms_rotated_(spec.norms_rotated),
      output_gate_(spec.output_gate),
      window_(spec.window),
      chunk_(spec.chunk),
      query_factors_(spec.query_factors),
      values_are_keys_(spec.values_are_keys),
      sharing_(spec.sharing),
      shared_place_(spec.shared_place) {
  const int64_t hidden = spec.hidden_size;
  const int64_t queries = spec.num_heads * head_dim_;
  const int64_t keys = spec.num_kv_heads * head_dim_;
  const auto projection = [&](const char* name, int64_t out) {
    const Linear::Options options{.in = hidden, .out = out, .bias = spec.qkv_bias};
    return register_module(name, std::make_shared<Hooked<ColumnParallelLinear>>(options, ranks_));
  };
  const bool takes_keys = sharing_ == AttentionSpec::Sharing::kTake;
  JointLinears::Layers projections{projection("q_proj", output_gate_ ? 2 * queries : queries)};
  if (!takes_keys) projections.push_back(projection("k_proj", keys));
  if (!takes_keys && !values_are_keys_) projections.push_back(projection("v_proj", keys));
  projections_ = JointLinears(std::move(projections));
  const Linear::Options options{
      .in = queries, .out = hidden, .bias = spec.out_bias, .init_scale = spec.output_init_scale};
  o_proj_ = register_module("o_proj", std::make_shared<Hooked<RowParallelLinear>>(options, ranks_));
  core_attention_ = register_module("core_attention",
                                    std::make_shared<Hooked<CoreAttention>>(spec.dropout, spec.scale, spec.softcap));
  if (spec.sinks) sinks_ = register_parameter("sinks", at::empty({num_heads_}));
  if (!spec.head_norm) return;
  TORCH_INTERNAL_ASSERT(!norms_rotated_ || !rotary_interleaved_ || !spec.head_norm->weight,
                        "weights of norms behind a rotation would need the order of its channels");
  const auto norm = [&](const char* name, int64_t channels) {
    NormSpec of_heads = *spec.head_norm;
    if (norms_all_heads_) of_heads.width = channels;
    return register_module(name, std::make_shared<Hooked<Norm>>(std::move(of_heads), ranks_, NormInput::kHeads));
  };
  q_norm_ = norm("q_norm", queries);
  if (takes_keys) return;
  k_norm_ = norm("k_norm", keys);
  if (!spec.norms_values) return;
  auto of_values = *spec.head_norm;
  of_values.weight = false;
  v_norm_ = register_module("v_norm", std::make_shared<Hooked<Norm>>(std::move(of_values), ranks_, NormInput::kHeads));
}

std::vector<at::Tensor> Attention::heads_of(const std::vector<at::Tensor>& projected,
                                            const RotaryTables& rotary) const {
  auto heads = turned_heads(projected, rotary);
  if (q_norm_ && norms_rotated_) {
    heads[0] = q_norm_->forward(heads[0]);
    heads[1] = k_norm_->forward(heads[1]);
  }
  if (v_norm_) heads[2] = v_norm_->forward(heads[2]);
  return heads;
}

at::Tensor Attention::turned_queries(const at::Tensor& projected, const RotaryTables& rotary) const {
  const auto q = projected.view({projected.size(0), projected.size(1), num_heads_, head_dim_});
  const auto normed = q_norm_ ? q_norm_->forward(q) : q;
  return rotary.cos.defined() ? rotate(normed, rotary.cos, rotary.sin) : normed;
}

std::vector<at::Tensor> Attention::turned_heads(const std::vector<at::Tensor>& projected,
                                                const RotaryTables& rotary) const {
  const auto& [cos, sin] = rotary;
  const bool turns = cos.defined(), norms = q_norm_ && !norms_rotated_;
  if (turns && !norms && !rotary_interleaved_ && !values_are_keys_ && can_rotate_columns(projected, cos))
    return rotate_columns_(projected, head_dim_, cos, sin);
  const auto cut = [&](const at::Tensor& x, int64_t heads) { return x.view({x.size(0), x.size(1), heads, head_dim_}); };
  const auto norm_of_all = [this](const std::shared_ptr<Hooked<Norm>>& norm, const at::Tensor& x) {
    return norms_all_heads_ ? norm->forward(x) : x;
  };
  auto q = cut(norm_of_all(q_norm_, projected[0]), num_heads_),
       k = cut(norm_of_all(k_norm_, projected[1]), num_kv_heads_);
  const bool norms_heads = norms && !norms_all_heads_;
  const bool at_once =
      norms_heads && turns && !rotary_interleaved_ && q_norm_->is_transparent() && k_norm_->is_transparent();
  // Contiguous, unless others share the memory: otherwise attention would keep all of it alive.
  const bool alone = turns && !at_once;
  const auto v = cut(alone ? projected[2].contiguous() : projected[2], num_kv_heads_);
  if (at_once) return {q_norm_->forward_rotated(q, cos, sin), k_norm_->forward_rotated(k, cos, sin), v};
  if (norms_heads) {
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  }
  if (!turns) return {q, k, v};
  if (rotary_interleaved_) {
    const int64_t dims = 2 * cos.size(-1);
    q = neighbours_to_halves(q, dims);
    k = neighbours_to_halves(k, dims);
  }
  return {rotate(q, cos, sin), rotate(k, cos, sin), v};
}

void Attention::init_own_weights(const WeightInit& init) {
  if (sinks_.defined()) draw_weight(sinks_, {num_heads_ * ranks_->size()}, 0, *ranks_, init.std, init);
}

void Attention::declare_cut(const DeviceMeshPtr& mesh) {
  if (sinks_.defined() && ranks_->size() > 1) set_tensor_parallel(sinks_, mesh, Placement::shard(0));
}

std::pair<at::Tensor, at::Tensor> Attention::queries_and_gates(const at::Tensor& projected) const {
  const auto both = projected.unflatten(2, {num_heads_, 2 * head_dim_});
  return {both.narrow(3, 0, head_dim_), both.narrow(3, head_dim_, head_dim_)};
}

LayerOutput Attention::forward(const at::Tensor& own, const Pass& pass) {
  auto projected = projections_.forward(ranks_->enter(own));
  at::Tensor gate;
  if (output_gate_) {
    const auto [queries, gates] = queries_and_gates(projected[0]);
    projected[0] = queries.flatten(2);
    gate = gates;
  }
  const auto tables = rotary_ ? pass.rotary[*rotary_] : RotaryTables();
  std::vector<at::Tensor> heads;
  if (sharing_ == AttentionSpec::Sharing::kTake) {
    const auto& [keys, values, place] = pass.shared_keys[shared_place_];
    heads = {turned_queries(projected[0], tables), keys, values};
  } else {
    if (values_are_keys_) projected.push_back(projected[1]);
    heads = heads_of(projected, tables);
    if (pass.cache) std::tie(heads[1], heads[2]) = pass.cache->add(this, heads[1], heads[2]);
  }
  if (query_factors_) heads[0] = scale_queries(heads[0], pass.query_factors);
  const auto finished = [&](const at::Tensor& mixed) {
    LayerOutput output{.hidden = o_proj_->forward((gate.defined() ? mixed * at::sigmoid(gate) : mixed).flatten(2))};
    if (sharing_ == AttentionSpec::Sharing::kGive) output.given = {heads[1], heads[2], shared_place_};
    return output;
  };
  if (pass.cache && !pass.cache->is_first()) {
    const CachedKeys cached{heads[1], heads[2], pass.cache->places(), window_, chunk_};
    return finished(core_attention_->forward_cached(heads[0], cached, sinks_));
  }
  // The ranks that share this rank's rows gather them, each with some of the heads.
  const SequenceShard rows = pass.span.sequence.of_place();
  const int64_t sharing = rows.is_whole() ? 1 : rows.group->size();
  const auto keys = spread_heads(heads[1], sharing), values = spread_heads(heads[2], sharing);
  const auto whole = gather_sequence({heads[0], keys, values}, rows);
  KeySpan span = pass.span;
  span.window = window_;
  if (chunk_ > 0) span.documents = pass.chunks;
  at::Tensor sinks = sinks_;
  if (sinks.defined() && !rows.is_whole()) sinks = sinks.chunk(sharing)[static_cast<size_t>(rows.group->rank())];
  const auto mixed = core_attention_->forward(whole[0], whole[1], whole[2], span, sinks);
  return finished(scatter_sequence(mixed, rows));
}

}  // namespace megashard
