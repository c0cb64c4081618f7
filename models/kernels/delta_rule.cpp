#include "models/kernels/delta_rule.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <optional>
#include <vector>

#include "models/kernels/chunks.h"
#include "models/kernels/delta_kernels.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

at::Tensor of_length_one(const at::Tensor& x) { return x * (x.square().sum(-1, /*keepdim=*/true) + 1e-6).rsqrt(); }

/// x of (I + A) x = wanted, where A is zero from the diagonal up. The inverse of a chunk's matrix costs less than to
/// solve for its columns forward and backward. Of A's gradient only what is below the diagonal has a meaning.
struct SolvedChunks : torch::autograd::Function<SolvedChunks> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& below,
                            const at::Tensor& wanted) {
    const auto one = at::eye(kChunk, below.options()).expand_as(below);
    const auto inverse =
        at::linalg_solve_triangular(below, one, /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
    auto solved = at::matmul(inverse, wanted);
    context->save_for_backward({inverse, solved});
    return solved;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    require_once_differentiated("gated_delta_rule");
    const auto saved = context->get_saved_variables();
    const auto of_wanted = at::matmul(saved[0].transpose(-1, -2), grads[0]);
    return {at::matmul(of_wanted, saved[1].transpose(-1, -2)).neg_(), of_wanted};
  }
};

/// The rule by delta_kernels.h.
struct RuleInCache : torch::autograd::Function<RuleInCache> {
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& decay, const at::Tensor& beta,
                            const std::optional<at::Tensor>& begins) {
    Tensors inputs{q, k, v, decay, beta};
    for (auto& each : inputs) each = each.contiguous();
    inputs.push_back(begins ? begins->contiguous() : at::Tensor());
    const auto shape = shape_of(inputs);
    const auto out = at::empty_like(inputs[2]), states = at::empty({delta_kernels::state_floats(shape)}, v.options());
    delta_kernels::forward(arrays<const float>(inputs), out.mutable_data_ptr<float>(), states.mutable_data_ptr<float>(),
                           shape, scratch(shape, v).mutable_data_ptr<float>());
    inputs.push_back(states);
    context->save_for_backward(std::move(inputs));
    return out;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& grads) {
    require_once_differentiated("gated_delta_rule");
    const auto saved = context->get_saved_variables();
    const auto shape = shape_of(saved);
    Tensors of_inputs;
    for (size_t i = 0; i < 5; ++i) of_inputs.push_back(at::empty_like(saved[i]));
    delta_kernels::backward(arrays<const float>(saved), grads[0].contiguous().const_data_ptr<float>(),
                            saved[6].const_data_ptr<float>(), arrays<float>(of_inputs), shape,
                            scratch(shape, saved[2]).mutable_data_ptr<float>());
    of_inputs.emplace_back();
    return of_inputs;
  }

 private:
  static delta_kernels::Shape shape_of(const Tensors& inputs) {
    const auto &k = inputs[1], &v = inputs[2], &begins = inputs[5];
    return {v.size(0),
            v.size(1),
            k.size(2),
            v.size(2),
            k.size(3),
            v.size(3),
            begins.defined() ? begins.const_data_ptr<int64_t>() : nullptr};
  }
  template <class T>
  static delta_kernels::Arrays<T> arrays(const Tensors& of) {
    const auto data = [](const at::Tensor& each) { return each.mutable_data_ptr<float>(); };
    return {data(of[0]), data(of[1]), data(of[2]), data(of[3]), data(of[4])};
  }
  static at::Tensor scratch(const delta_kernels::Shape& shape, const at::Tensor& like) {
    return at::empty({at::get_num_threads(), delta_kernels::scratch_floats(shape)}, like.options());
  }
};

}  // namespace

at::Tensor gated_delta_rule(const DeltaRuleInputs& x) {
  if (x.v.is_cpu() && x.v.scalar_type() == at::kFloat && x.decay.dim() == 3 && x.v.numel() > 0)
    return RuleInCache::apply(x.q, x.k, x.v, x.decay, x.beta,
                              x.begins.defined() ? std::optional(x.begins) : std::nullopt);
  const int64_t batch = x.v.size(0), length = x.v.size(1), key_heads = x.k.size(2), value_heads = x.v.size(2);
  const int64_t key_dim = x.k.size(3), value_dim = x.v.size(3);
  const Chunks chunks(length);
  const auto heads_first = [&](const at::Tensor& each) { return chunks.of_heads(each, key_heads); };
  const auto q = heads_first(of_length_one(x.q) / std::sqrt(static_cast<double>(key_dim)));
  const auto k = heads_first(of_length_one(x.k));
  const auto v = heads_first(x.v), beta = heads_first(x.beta).unsqueeze(-1);
  const Decays decays(heads_first(x.decay.dim() == 3 ? x.decay.unsqueeze(-1) : x.decay), chunks.of_begins(x.begins));

  // A chunk writes V' - K' S, where S is the state before it. Solves (I + A) [V', K'] = beta [v, e^G k] for V' and K',
  // with A the overlap of the chunk's keys, and G the sum of decays since its begin.
  const auto overlap = decays.products(k, k).tril(-1) * beta;
  const auto wanted = at::cat({beta * v, (beta * decays.from_begin) * k}, -1);
  const auto solved = SolvedChunks::apply(overlap, wanted);
  const auto seen = decays.products(q, k);
  const auto from_state = q * decays.from_begin, to_state = (k * decays.to_end).transpose(-1, -2);

  // The gradient of an unbound tensor is one tensor; of each selected chunk it would have the size of all chunks.
  const auto of_chunks = [](const at::Tensor& each) { return each.unbind(3); };
  const auto solved_of = of_chunks(solved), seen_of = of_chunks(seen), from_state_of = of_chunks(from_state);
  const auto to_state_of = of_chunks(to_state), through_of = of_chunks(decays.through);
  at::Tensor state;  // [B, Hk, r, Dk, Dv]; undefined: zero
  std::vector<at::Tensor> results;
  for (size_t n = 0; n < solved_of.size(); ++n) {
    const auto& both = solved_of[n];
    auto written = both.narrow(-1, 0, value_dim);
    if (state.defined()) written = written - at::matmul(both.narrow(-1, value_dim, key_dim), state);
    auto result = at::matmul(seen_of[n], written);
    if (state.defined()) result = result + at::matmul(from_state_of[n], state);
    results.push_back(result);
    if (n + 1 == solved_of.size()) break;
    const auto added = at::matmul(to_state_of[n], written);
    state = state.defined() ? state * through_of[n] + added : added;
  }
  const auto all = at::stack(results, 1);  // [B, N, Hk, r, chunk, Dv]
  return all.permute({0, 1, 4, 2, 3, 5}).reshape({batch, -1, value_heads, value_dim}).narrow(1, 0, length);
}

}  // namespace megashard
