#include "models/layers/causal_attention.h"

#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"
#include "models/layers/capped_attention.h"
#include "parallel/sequence_parallel/block_attention.h"

namespace megashard {
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
