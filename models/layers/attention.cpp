#include "models/layers/attention.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>

#include "framework/mistakes.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/row_layout.h"
#include "models/layers/causal_attention.h"
#include "parallel/sequence_parallel/ring_attention.h"
#include "parallel/sequence_parallel/ulysses.h"

namespace megashard {
namespace {

/// Reorders the first `dims` channels, even ones before odd ones, so that pairs of neighbours become pairs of halves.
/// Queries and keys are permuted equally, so their products are unchanged.
at::Tensor neighbours_to_halves(const at::Tensor& x, int64_t dims) {
  const auto halves = x.narrow(3, 0, dims).unflatten(3, {dims / 2, 2}).transpose(3, 4).flatten(3);
  return at::cat({halves, x.narrow(3, dims, x.size(3) - dims)}, 3);
}

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
    const double keys = window - window * window / (2.0 * length);
    return 12.0 * static_cast<double>(spec_.head_dim) * heads * (hidden + hidden * groups / heads + keys);
  }
  std::vector<SharedSize> sizes_over_ranks() const override {
    return {{spec_.num_heads, "attention heads"}, {spec_.num_kv_heads, "key and value heads"}};
  }
  void check_sequence_ranks(const std::string& model, int64_t ranks, int64_t tensor_parallel) const override {
    check_ulysses_heads(model, spec_.num_heads / tensor_parallel, spec_.num_kv_heads / tensor_parallel, ranks);
  }
  void check_sequence_ring(const std::string& model) const override {
    require(spec_.dropout == 0,
            c10::str(model, " has an attention dropout of ", spec_.dropout,
                     ", and ring attention has none; give --attention-dropout 0 (in config.json attention_dropout), or "
                     "--context-parallel-algo ulysses_cp_algo."));
  }
  std::vector<std::string> paths_of(const std::string& megatron_part) const override {
    if (megatron_part == "core_attn") return {"core_attention"};
    if (megatron_part == "qkv_linear") return {"q_proj", "k_proj", "v_proj"};
    return megatron_part == "attn_proj" ? std::vector<std::string>{"o_proj"} : std::vector<std::string>{};
  }
  std::string norm_before() const override { return "attn_norm"; }

 private:
  AttentionSpec spec_;
};

}  // namespace

PartSpecPtr attention_part(AttentionSpec spec) { return std::make_shared<AttentionPart>(std::move(spec)); }

at::Tensor CoreAttention::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span) {
  if (span.sequence.ring) {
    const bool by_fp32 = by_way_of_fp32(q);
    const auto computed = [&](const at::Tensor& x) { return by_fp32 ? x.to(at::kFloat) : x; };
    const RingMask mask{.document_begins = span.documents ? span.documents->begins : at::Tensor(),
                        .window = span.window};
    return ring_attention(computed(q), computed(k), computed(v), mask, scale_, span.sequence).to(q.scalar_type());
  }
  return causal_attention(q, k, v, span, {.dropout = is_training() ? dropout_ : 0.0, .scale = scale_});
}

Attention::Attention(const AttentionSpec& spec, const BuildContext& context)
    : class_name_(spec.class_name),
      ranks_(context.tensor_parallel),
      num_heads_(spec.num_heads / ranks_->size()),
      num_kv_heads_(spec.num_kv_heads / ranks_->size()),
      head_dim_(spec.head_dim),
      rotary_(spec.rotary),
      rotary_interleaved_(spec.rotary_interleaved),
      window_(spec.window) {
  const int64_t hidden = spec.hidden_size;
  const int64_t queries = spec.num_heads * head_dim_;
  const int64_t keys = spec.num_kv_heads * head_dim_;
  const auto projection = [&](const char* name, int64_t out) {
    const Linear::Options options{.in = hidden, .out = out, .bias = spec.qkv_bias};
    return register_module(name, std::make_shared<Hooked<ColumnParallelLinear>>(options, ranks_));
  };
  const auto q_proj = projection("q_proj", queries);
  const auto k_proj = projection("k_proj", keys);
  projections_ = JointLinears({q_proj, k_proj, projection("v_proj", keys)});
  const Linear::Options options{
      .in = queries, .out = hidden, .bias = spec.out_bias, .init_scale = spec.output_init_scale};
  o_proj_ = register_module("o_proj", std::make_shared<Hooked<RowParallelLinear>>(options, ranks_));
  core_attention_ = register_module("core_attention", std::make_shared<Hooked<CoreAttention>>(spec));
  if (!spec.head_norm) return;
  q_norm_ = register_module("q_norm", std::make_shared<Hooked<Norm>>(*spec.head_norm, ranks_, NormInput::kHeads));
  k_norm_ = register_module("k_norm", std::make_shared<Hooked<Norm>>(*spec.head_norm, ranks_, NormInput::kHeads));
}

std::vector<at::Tensor> Attention::heads_of(const std::vector<at::Tensor>& projected,
                                            const RotaryTables& rotary) const {
  const auto& [cos, sin] = rotary;
  const bool turns = cos.defined();
  if (turns && !q_norm_ && !rotary_interleaved_ && can_rotate_columns(projected, cos))
    return rotate_columns_(projected, head_dim_, cos, sin);
  const auto cut = [&](const at::Tensor& x, int64_t heads) { return x.view({x.size(0), x.size(1), heads, head_dim_}); };
  auto q = cut(projected[0], num_heads_), k = cut(projected[1], num_kv_heads_);
  const bool at_once =
      q_norm_ && turns && !rotary_interleaved_ && q_norm_->is_transparent() && k_norm_->is_transparent();
  // Contiguous, unless others share the memory: otherwise attention would keep all of it alive.
  const bool alone = turns && !at_once;
  const auto v = cut(alone ? projected[2].contiguous() : projected[2], num_kv_heads_);
  if (at_once) return {q_norm_->forward_rotated(q, cos, sin), k_norm_->forward_rotated(k, cos, sin), v};
  if (q_norm_) {
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

at::Tensor Attention::forward(const at::Tensor& own, const Pass& pass) {
  const auto heads =
      heads_of(projections_.forward(ranks_->enter(own)), rotary_ ? pass.rotary[*rotary_] : RotaryTables());
  // The ranks that share this rank's rows gather them, each with some of the heads.
  const SequenceShard rows = pass.span.sequence.of_place();
  const int64_t sharing = rows.is_whole() ? 1 : rows.group->size();
  const auto keys = spread_heads(heads[1], sharing), values = spread_heads(heads[2], sharing);
  const auto whole = gather_sequence({heads[0], keys, values}, rows);
  KeySpan span = pass.span;
  span.window = window_;
  const auto mixed = core_attention_->forward(whole[0], whole[1], whole[2], span);
  return o_proj_->forward(scatter_sequence(mixed, rows).flatten(2));
}

}  // namespace megashard
