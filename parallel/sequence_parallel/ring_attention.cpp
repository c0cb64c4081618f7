#include "parallel/sequence_parallel/ring_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <optional>
#include <utility>

#include "parallel/device/streams.h"
#include "parallel/sequence_parallel/block_attention.h"
#include "parallel/sequence_parallel/ring_blocks.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// A tensor sent to the next place and the one received from the previous place. On a GPU both use the ring's stream
/// and are kept until the current stream has waited for it.
class Passage {
 public:
  Passage(const Ring& ring, at::Tensor sent) : sent_(std::move(sent)), received_(at::empty_like(sent_)) {
    if (ring.stream) order_streams(current_stream(sent_.device()), *ring.stream);
    const StreamScope scope(ring.stream);
    work_ = ring.group->shift_into(received_, sent_, 1);
    if (ring.stream) passed_ = StreamEvent::record(*ring.stream);
  }

  at::Tensor arrival() {
    work_.wait();
    if (!received_.is_cpu()) passed_.make_wait(current_stream(received_.device()));
    sent_.reset();
    return std::move(received_);
  }

 private:
  at::Tensor sent_, received_;
  Work work_;
  StreamEvent passed_;
};

/// State shared by all steps of a call.
struct RingCall : torch::CustomClassHolder {
  SequenceShard shard;
  int64_t window = 0;
  bool causal = true;
  double scale = 0;

  int places() const { return shard.ring->group->size(); }
  /// Place whose keys are here at a step.
  int source_at(int step) const { return (shard.ring->group->rank() + places() - step) % places(); }
  RingMask mask(const at::Tensor& begins, const at::Tensor& keys) const { return {begins, window, causal, keys}; }
  std::vector<RingBlock> blocks_at(int step, const RingMask& mask, const at::Tensor& q) const {
    return ring_blocks(mask, places(), shard.ring->group->rank(), source_at(step), q.size(1), q.device());
  }
};
using RingCallPtr = c10::intrusive_ptr<RingCall>;

/// Rows of [B, rows, heads, D] in the kernels' layout [B, heads, rows, D].
at::Tensor heads_of(const at::Tensor& x, const RowRange& rows) {
  return x.narrow(1, rows.begin, rows.size).transpose(1, 2);
}

/// Attention of a place's queries over the keys seen so far.
class MergedAttention {
 public:
  explicit MergedAttention(const at::Tensor& q)
      : out_(at::zeros(q.sizes(), q.options().dtype(accumulated_dtype(q)))),
        lse_(at::full({q.size(0), q.size(2), q.size(1)}, kNoKey, out_.options())) {}

  void add(const BlockAttention& block, const RowRange& queries) {
    const at::Tensor lse = lse_.narrow(2, queries.begin, queries.size);
    const at::Tensor both = at::logaddexp(lse, block.lse);
    heads_of(out_, queries)
        .mul_((lse - both).exp_().unsqueeze(3))
        .add_(block.out * (block.lse - both).exp_().unsqueeze(3));
    lse.copy_(both);
  }

  const at::Tensor& out() const { return out_; }  ///< [B, rows, H, D]
  const at::Tensor& lse() const { return lse_; }  ///< [B, H, rows]

 private:
  at::Tensor out_, lse_;
};

struct RingAttention : torch::autograd::Function<RingAttention> {
  static Variable forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& document_begins, const std::optional<at::Tensor>& keys,
                          const RingCallPtr& call) {
    const RingMask mask = call->mask(document_begins.value_or(at::Tensor()), keys.value_or(at::Tensor()));
    MergedAttention merged(q);
    at::Tensor keys_values = at::stack({k, v});
    for (int step = 0; step < call->places(); ++step) {
      std::optional<Passage> next;
      if (step + 1 < call->places()) next.emplace(*call->shard.ring, keys_values);
      for (const auto& block : call->blocks_at(step, mask, q)) {
        merged.add(attend_block(heads_of(q, block.queries), heads_of(keys_values[0], block.keys),
                                heads_of(keys_values[1], block.keys), block.mask, call->scale),
                   block.queries);
      }
      if (next) keys_values = next->arrival();
    }
    const at::Tensor out = merged.out().to(q.scalar_type());
    context->save_for_backward({q, k, v, mask.document_begins, out, merged.lse(), mask.keys});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "ring attention has no second derivative: call backward without create_graph");
    const auto saved = context->get_saved_variables();
    const auto &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[4], &lse = saved[5];
    const auto& call = static_cast<const RingCall&>(*context->saved_data["call"].toCapsule());
    const RingMask mask = call.mask(saved[3], saved[6]);
    const at::Tensor& grad_out = grads[0];
    const auto accumulated = q.options().dtype(accumulated_dtype(q));
    const at::Tensor grad_q = at::zeros(q.sizes(), accumulated);
    at::Tensor keys_values = at::stack({k, v});
    std::optional<Passage> gradients;  // gradients of the current keys and values, from the places that had them before
    for (int step = 0; step < call.places(); ++step) {
      std::optional<Passage> next;
      if (step + 1 < call.places()) next.emplace(*call.shard.ring, keys_values);
      const at::Tensor grad_keys_values = at::zeros(keys_values.sizes(), accumulated);
      for (const auto& block : call.blocks_at(step, mask, q)) {
        const BlockAttention whole{.out = heads_of(out, block.queries),
                                   .lse = lse.narrow(2, block.queries.begin, block.queries.size)};
        const BlockGradients of_block = attend_block_backward(
            heads_of(grad_out, block.queries), heads_of(q, block.queries), heads_of(keys_values[0], block.keys),
            heads_of(keys_values[1], block.keys), whole, block.mask, call.scale);
        heads_of(grad_q, block.queries).add_(of_block.q);
        heads_of(grad_keys_values[0], block.keys).add_(of_block.k);
        heads_of(grad_keys_values[1], block.keys).add_(of_block.v);
      }
      if (gradients) grad_keys_values.add_(gradients->arrival());
      gradients.emplace(*call.shard.ring, grad_keys_values);
      if (next) keys_values = next->arrival();
    }
    const at::Tensor home = gradients->arrival();
    return {grad_q.to(q.scalar_type()),
            home[0].to(k.scalar_type()),
            home[1].to(v.scalar_type()),
            Variable(),
            Variable(),
            Variable()};
  }
};

}  // namespace

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const RingMask& mask,
                          std::optional<double> scale, const SequenceShard& shard) {
  TORCH_CHECK(shard.ring != nullptr, "ring attention needs a sequence in a ring");
  const int64_t rows = shard.of_place().length, width = q.size(3);
  TORCH_CHECK(q.size(1) == rows && k.sizes() == v.sizes() && k.size(1) == rows && q.size(2) % k.size(2) == 0,
              "ring attention of ", rows, " rows a place takes queries [B, ", rows, ", H, D], keys and values [B, ",
              rows, ", G, D] with G a divisor of H; got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  const at::Tensor& begins = mask.document_begins;
  TORCH_CHECK(!begins.defined() || (begins.dim() == 2 && begins.size(1) == shard.length),
              "the documents of ring attention are [B, ", shard.length, "], those of the whole sequence; got ",
              begins.sizes());
  TORCH_INTERNAL_ASSERT(mask.causal ? !mask.keys.defined() : !begins.defined() && mask.window == 0);
  TORCH_CHECK(!mask.keys.defined() || (mask.keys.dim() == 2 && mask.keys.size(1) == shard.length),
              "the keys of ring attention are [B, ", shard.length, "], those of the whole sequence; got ",
              mask.keys.sizes());
  const auto call = c10::make_intrusive<RingCall>();
  call->shard = shard;
  call->window = mask.window;
  call->causal = mask.causal;
  call->scale = scale.value_or(1 / std::sqrt(static_cast<double>(width)));
  const int64_t missing = q.is_cuda() ? missing_channels(width) : 0;
  const auto given = [](const at::Tensor& each) { return each.defined() ? std::optional(each) : std::nullopt; };
  const auto documents = given(begins), keys = given(mask.keys);
  if (missing == 0) return RingAttention::apply(q, k, v, documents, keys, call);
  const auto wide = [missing](const at::Tensor& x) { return at::constant_pad_nd(x, {0, missing}); };
  return RingAttention::apply(wide(q), wide(k), wide(v), documents, keys, call).narrow(3, 0, width);
}

}  // namespace megashard
