#include "models/kernels/fused_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include <cstdlib>
#include <optional>
#include <string_view>

#include "models/kernels/fused_operators.h"
#include "models/kernels/once_differentiable.h"

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

}  // namespace megashard
