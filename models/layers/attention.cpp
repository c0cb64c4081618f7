#include "models/layers/attention.h"

#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "framework/mistakes.h"
#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"
#include "models/kernels/row_layout.h"
#include "models/layers/cached_attention.h"
#include "models/layers/capped_attention.h"
#include "models/layers/fused_forms.h"
#include "models/layers/key_cache.h"
#include "parallel/sequence_parallel/block_attention.h"
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

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// False for MEGASHARD_CPU_ATTENTION=libtorch: CPUs then use LibTorch's kernels, with the bits of the simulated device.
bool is_wanted() {
  static const bool wanted = [] {
    const char* given = std::getenv("MEGASHARD_CPU_ATTENTION");
    return given == nullptr || std::string_view(given) != "libtorch";
  }();
  return wanted;
}

at::Tensor with_dense_channels(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

/// With a sink, a query's weights are those of softmax over its scores and the sink; so are the kernel's in backward,
/// from the log-sum-exp of all of them.
struct AttentionFunction : Function<AttentionFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& q_in, const at::Tensor& k_in,
                          const at::Tensor& v_in, const std::optional<at::Tensor>& key_begins,
                          const std::optional<at::Tensor>& key_ends, int64_t window, double scale,
                          const std::optional<at::Tensor>& sinks) {
    const auto q = with_dense_channels(q_in), k = with_dense_channels(k_in), v = with_dense_channels(v_in);
    auto [out, lse] = fused_operators().attention(q, k, v, key_begins, key_ends, window, scale);
    if (sinks) {
      const auto of_all = at::logaddexp(lse, sinks->to(at::kFloat).unsqueeze(-1));  // [B, H, T]
      out = (out * (lse - of_all).exp().transpose(1, 2).unsqueeze(-1)).to(out.scalar_type());
      lse = of_all;
    }
    context->save_for_backward({q, k, v, out, lse, key_begins.value_or(at::Tensor()), key_ends.value_or(at::Tensor()),
                                sinks.value_or(at::Tensor())});
    context->saved_data["window"] = window;
    context->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("attention");
    const auto saved = context->get_saved_variables();
    const auto given = [&](size_t i) { return saved[i].defined() ? std::optional(saved[i]) : std::nullopt; };
    const auto [grad_q, grad_k, grad_v] = fused_operators().attention_backward(
        with_dense_channels(grads[0]), saved[0], saved[1], saved[2], saved[3], saved[4], given(5), given(6),
        context->saved_data["window"].toInt(), context->saved_data["scale"].toDouble());
    const auto &out = saved[3], &lse = saved[4], &sinks = saved[7];
    at::Tensor grad_sinks;
    if (sinks.defined()) {
      const auto share = (sinks.to(at::kFloat).unsqueeze(-1) - lse).exp();  // the sink's weight
      const auto products = (grads[0] * out).sum(-1, /*keepdim=*/false, at::kFloat).transpose(1, 2);
      grad_sinks = -(share * products).sum(at::IntArrayRef{0, 2}).to(sinks.scalar_type());
    }
    return {grad_q, grad_k, grad_v, Variable(), Variable(), Variable(), Variable(), grad_sinks};
  }
};

}  // namespace

bool has_fused_attention(const at::Tensor& q) {
  return is_wanted() && q.is_cpu() && has_kernel(fused_operators().attention, q);
}

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeyRange& range,
                           double scale, const at::Tensor& sinks) {
  const auto given = [](const at::Tensor& each) { return each.defined() ? std::optional(each) : std::nullopt; };
  return AttentionFunction::apply(q, k, v, given(range.key_begins), given(range.key_ends), range.window, scale,
                                  given(sinks));
}

namespace {

/// Queries per part of a long window; each part's keys, a window more than its queries, use the same mask.
constexpr int64_t kMostQueries = 256;

struct Heads {
  at::Tensor q, k, v;  ///< [B, T, heads, D]
};

at::Tensor attend(const Heads& x, const std::optional<at::Tensor>& allowed, const AttentionOptions& options);

/// attend() with a further key of zeros, whose score is the sink and whose value is zero.
at::Tensor attend_with_sinks(const Heads& x, std::optional<at::Tensor> allowed, AttentionOptions options) {
  const int64_t queries = x.q.size(1), keys = x.k.size(1), heads = x.q.size(2);
  if (!allowed) allowed = at::ones({queries, keys}, x.q.options().dtype(at::kBool)).tril();
  const auto mask = at::zeros({queries, keys}, x.q.options())
                        .masked_fill(allowed->logical_not(), -std::numeric_limits<double>::infinity());
  const auto sink = options.sinks.to(x.q.scalar_type()).view({1, heads, 1, 1}).expand({1, heads, queries, 1});
  const auto with_zeros = [](const at::Tensor& each) { return at::constant_pad_nd(each, {0, 0, 0, 0, 0, 1}); };
  options.sinks = at::Tensor();
  return attend({x.q, with_zeros(x.k), with_zeros(x.v)}, at::cat({mask.expand({1, heads, queries, keys}), sink}, 3),
                options);
}

/// The last query has the last key. Without `allowed`: as many queries as keys, causal.
at::Tensor attend(const Heads& x, const std::optional<at::Tensor>& allowed, const AttentionOptions& options) {
  if (options.sinks.defined()) return attend_with_sinks(x, allowed, options);
  const auto heads_first = [](const at::Tensor& each) { return each.transpose(1, 2); };
  return at::scaled_dot_product_attention(heads_first(x.q), heads_first(x.k), heads_first(x.v), allowed,
                                          options.dropout, /*is_causal=*/!allowed, options.scale,
                                          /*enable_gqa=*/x.q.size(2) != x.k.size(2))
      .transpose(1, 2);
}

/// Sliding-window attention for one part of the queries at a time.
class WindowedAttention {
 public:
  WindowedAttention(int64_t window, const AttentionOptions& options) : window_(window), options_(options) {}

  at::Tensor operator()(const Heads& x) {
    const int64_t length = x.q.size(1);
    if (window_ == 0 || window_ >= length) return attend(x, std::nullopt, options_);
    const auto queries = x.q.split(part_, 1), keys = x.k.split(part_, 1), values = x.v.split(part_, 1);
    std::vector<at::Tensor> mixed;
    for (int64_t i = 0; i < std::ssize(queries); ++i) {
      const auto first = static_cast<size_t>(std::max<int64_t>(0, i - before_)), count = static_cast<size_t>(i) + 1;
      const auto seen = [&](const std::vector<at::Tensor>& parts) {
        return at::cat(at::TensorList(parts).slice(first, count - first), 1);
      };
      const auto& q = queries[static_cast<size_t>(i)];
      mixed.push_back(attend({q, seen(keys), seen(values)}, allowed(q.size(1), std::min(i, before_), q), options_));
    }
    return at::cat(mixed, 1);
  }

 private:
  /// Mask for the keys of `parts` parts before the queries' part, and of that part; nullopt if the window contains all.
  std::optional<at::Tensor> allowed(int64_t queries, int64_t parts, const at::Tensor& like) {
    if (parts == 0) return std::nullopt;
    const int64_t most = before_ * part_, ahead = parts * part_;
    if (!allowed_.defined()) {
      const auto all = at::ones({part_, most + part_}, like.options().dtype(at::kBool));
      allowed_ = all.tril(most).triu(most - window_ + 1);
    }
    return allowed_.narrow(0, 0, queries).narrow(1, most - ahead, ahead + queries);
  }

  int64_t window_;
  int64_t part_ = std::min(window_, kMostQueries);
  int64_t before_ = window_ == 0 ? 0 : (window_ - 1 + part_ - 1) / part_;  // number of earlier parts with visible keys
  const AttentionOptions& options_;
  at::Tensor allowed_;
};

at::Tensor by_pieces(const Heads& x, const KeySpan& span, const AttentionOptions& options) {
  WindowedAttention attention(span.window, options);
  if (!span.documents) return attention(x);
  const auto pieces = [&](const at::Tensor& each) {
    return each.flatten(0, 1).unsqueeze(0).split_with_sizes(span.documents->lengths, 1);
  };
  const auto queries = pieces(x.q), keys = pieces(x.k), values = pieces(x.v);
  std::vector<at::Tensor> mixed;
  for (size_t i = 0; i < queries.size(); ++i) mixed.push_back(attention({queries[i], keys[i], values[i]}));
  return at::cat(mixed, 1).view(x.q.sizes());
}

/// With a mask for one part of the queries at a time.
at::Tensor by_masks(const Heads& x, const KeySpan& span, const AttentionOptions& options) {
  const int64_t rows = x.q.size(0), length = x.q.size(1);
  const auto device = x.q.device();
  const auto keys = at::arange(length, at::TensorOptions(at::kLong).device(device));
  auto begins = span.window > 0 ? keys - (span.window - 1) : at::zeros_like(keys);  // [T] or [B, T]
  if (span.documents) begins = at::maximum(begins, span.documents->token_begins(rows, length, device));
  const auto ends = span.key_ends.to(device);
  std::vector<at::Tensor> mixed;
  for (int64_t first = 0; first < length; first += kMostQueries) {
    const int64_t count = std::min(kMostQueries, length - first);
    const auto bound = [&](const at::Tensor& each) { return each.narrow(-1, first, count).unsqueeze(-1); };
    const auto allowed = keys.ge(bound(begins)).logical_and(keys.lt(bound(ends)));  // [B, count, T]
    mixed.push_back(attend({x.q.narrow(1, first, count), x.k, x.v}, allowed.unsqueeze(1), options));
  }
  return at::cat(mixed, 1);
}

/// Calls flash attention as torch.nn.attention.varlen.varlen_attn does.
at::Tensor by_flash(const Heads& x, const KeySpan& span, const AttentionOptions& options) {
  const int64_t width = x.q.size(3), missing = missing_channels(width);
  const auto rows = [&](const at::Tensor& each) {
    const auto wide = missing == 0 ? each : at::constant_pad_nd(each, {0, missing});
    return span.documents ? wide.flatten(0, 1) : wide;
  };
  const auto ends = span.documents ? std::optional(span.documents->ends) : std::nullopt;
  const int64_t longest = span.documents ? span.documents->longest : x.q.size(1);
  const auto before = span.window > 0 ? std::optional(span.window - 1) : std::nullopt;
  const auto behind = span.window > 0 ? std::optional<int64_t>(0) : std::nullopt;
  const auto mixed = std::get<0>(at::_flash_attention_forward(
      rows(x.q), rows(x.k), rows(x.v), ends, ends, longest, longest, options.dropout, /*is_causal=*/true,
      /*return_debug_mask=*/false, options.scale.value_or(1 / std::sqrt(static_cast<double>(width))), before, behind));
  return mixed.narrow(-1, 0, width).reshape(x.q.sizes());
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                            const AttentionOptions& options) {
  if (options.softcap > 0) return capped_attention(q, k, v, span, options);
  const bool is_plain = options.dropout == 0 && v.size(3) == q.size(3);
  if (is_plain && has_fused_attention(q)) {
    const KeyRange range{span.documents ? span.documents->begins : at::Tensor(), span.key_ends, span.window};
    const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
    return fused_attention(q, k, v, range, scale, options.sinks);
  }
  if (by_way_of_fp32(q))
    return causal_attention(q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat), span, options).to(q.scalar_type());
  const Heads heads{q, k, v};
  if (span.key_ends.defined()) return by_masks(heads, span, options);
  const bool sees_all = !span.documents && (span.window == 0 || span.window >= q.size(1));
  if (sees_all) return attend(heads, std::nullopt, options);
  return has_flash_kernel(q) && !options.sinks.defined() ? by_flash(heads, span, options)
                                                         : by_pieces(heads, span, options);
}

}  // namespace megashard
