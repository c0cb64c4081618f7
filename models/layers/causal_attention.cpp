#include "models/layers/causal_attention.h"

#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"
#include "parallel/copies/on_device.h"
#include "parallel/sequence_parallel/block_attention.h"

namespace megashard {
namespace {

at::Tensor ends_of(const std::vector<int64_t>& lengths) {
  const at::Tensor ends = at::empty({std::ssize(lengths) + 1}, at::TensorOptions(at::kInt).device(at::kCPU));
  auto* end = ends.mutable_data_ptr<int32_t>();
  *end = 0;
  for (const int64_t length : lengths) {
    end[1] = end[0] + static_cast<int32_t>(length);
    ++end;
  }
  return ends;
}

at::Tensor begins_of(const std::vector<int64_t>& lengths, int64_t rows, int64_t row_length) {
  const at::Tensor begins = at::empty({rows, row_length}, at::TensorOptions(at::kLong).device(at::kCPU));
  auto* begin = begins.mutable_data_ptr<int64_t>();
  int64_t token = 0;
  for (const int64_t length : lengths) {
    std::fill_n(begin + token, length, token % row_length);
    token += length;
  }
  return begins;
}

}  // namespace

std::shared_ptr<const Documents> Documents::of(const at::Tensor& lengths, int64_t rows, int64_t length, bool in_ring,
                                               c10::Device device) {
  if (!lengths.defined()) return nullptr;
  TORCH_CHECK(lengths.is_cpu() && lengths.dim() == 1 && lengths.scalar_type() == at::kLong,
              "document_lengths must be int64 of one dimension in host memory, got ", lengths.scalar_type(), " ",
              lengths.sizes(), " on ", lengths.device());
  const auto dense = lengths.contiguous();
  const auto* first = dense.const_data_ptr<int64_t>();
  auto documents = std::make_shared<Documents>();
  documents->lengths.assign(first, first + dense.numel());
  int64_t tokens = 0;
  for (const int64_t each : documents->lengths) {
    TORCH_CHECK(each > 0 && tokens % length + each <= length, "document_lengths ", documents->lengths,
                " are not those of rows of ", length, " tokens: a document ends with its row");
    tokens += each;
    documents->longest = std::max(documents->longest, each);
  }
  TORCH_CHECK(tokens == rows * length, "document_lengths are of ", tokens, " tokens, but there are ", rows, " rows of ",
              length);
  if (in_ring || device.is_cpu()) {
    documents->begins = on_device(begins_of(documents->lengths, rows, length), device);
  } else {
    documents->ends = on_device(ends_of(documents->lengths), device);
  }
  return documents;
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

struct AttentionFunction : Function<AttentionFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& q_in, const at::Tensor& k_in,
                          const at::Tensor& v_in, const std::optional<at::Tensor>& key_begins, int64_t window,
                          double scale) {
    const auto q = with_dense_channels(q_in), k = with_dense_channels(k_in), v = with_dense_channels(v_in);
    const auto [out, lse] = fused_operators().attention(q, k, v, key_begins, window, scale);
    context->save_for_backward({q, k, v, out, lse, key_begins.value_or(at::Tensor())});
    context->saved_data["window"] = window;
    context->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("attention");
    const auto saved = context->get_saved_variables();
    const auto key_begins = saved[5].defined() ? std::optional(saved[5]) : std::nullopt;
    const auto [grad_q, grad_k, grad_v] = fused_operators().attention_backward(
        with_dense_channels(grads[0]), saved[0], saved[1], saved[2], saved[3], saved[4], key_begins,
        context->saved_data["window"].toInt(), context->saved_data["scale"].toDouble());
    return {grad_q, grad_k, grad_v, Variable(), Variable(), Variable()};
  }
};

}  // namespace

bool has_fused_attention(const at::Tensor& q) {
  return is_wanted() && q.is_cpu() && has_kernel(fused_operators().attention, q);
}

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeyRange& range,
                           double scale) {
  const auto begins = range.key_begins.defined() ? std::optional(range.key_begins) : std::nullopt;
  return AttentionFunction::apply(q, k, v, begins, range.window, scale);
}

namespace {

/// Queries per part of a long window; each part's keys, a window more than its queries, use the same mask.
constexpr int64_t kMostQueries = 256;

struct Heads {
  at::Tensor q, k, v;  ///< [B, T, heads, D]
};

/// The last query has the last key. Without `allowed`: as many queries as keys, causal.
at::Tensor attend(const Heads& x, const std::optional<at::Tensor>& allowed, const AttentionOptions& options) {
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
  const bool is_plain = options.dropout == 0 && v.size(3) == q.size(3);
  if (is_plain && has_fused_attention(q)) {
    const KeyRange range{span.documents ? span.documents->begins : at::Tensor(), span.window};
    return fused_attention(q, k, v, range, options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))));
  }
  if (by_way_of_fp32(q))
    return causal_attention(q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat), span, options).to(q.scalar_type());
  const Heads heads{q, k, v};
  const bool sees_all = !span.documents && (span.window == 0 || span.window >= q.size(1));
  if (sees_all) return attend(heads, std::nullopt, options);
  return has_flash_kernel(q) ? by_flash(heads, span, options) : by_pieces(heads, span, options);
}

}  // namespace megashard
