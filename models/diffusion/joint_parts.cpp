#include "models/diffusion/joint_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "models/layers/full_attention.h"

namespace megashard {

JointRows joint_rows(const Batch& input, const at::Tensor& text, const at::Tensor& text_mask) {
  const auto& sequence = input.sequence;
  const int64_t ranks = sequence.is_whole() ? 1 : sequence.group->size();
  const int64_t multiple = sequence.is_whole() || sequence.ring == nullptr ? ranks : 2 * ranks;
  const int64_t patches = sequence.is_whole() ? input.length() : sequence.length;
  TORCH_CHECK(patches % multiple == 0, "a sequence of ", patches, " patches and text on ", ranks,
              " ranks needs a multiple of ", multiple,
              " patches: choose other sizes of the pictures, or fewer ranks (--context-parallel-size)");
  const int64_t missing = (multiple - text.size(1) % multiple) % multiple;
  const auto padded = missing == 0 ? text : at::constant_pad_nd(text, {0, 0, 0, missing});
  const auto of_text = sequence.with_length(padded.size(1));
  const auto options = at::TensorOptions().device(text.device());
  JointRows rows{.text = of_text.rows_of(padded, 1),
                 .numbers = of_text.rows_of(at::arange(padded.size(1), options.dtype(at::kLong)), 0),
                 .sequence = sequence.with_length(padded.size(1) + patches)};
  const auto token_mask = input.token_mask();
  if (!token_mask.defined() && !text_mask.defined() && missing == 0) return rows;
  const auto all = [&](int64_t length) { return at::ones({text.size(0), length}, options.dtype(at::kBool)); };
  auto keys = text_mask.defined() ? text_mask : all(text.size(1));
  if (missing > 0) keys = at::constant_pad_nd(keys, {0, missing});
  const auto own = at::cat({of_text.rows_of(keys, 1), token_mask.defined() ? token_mask : all(input.length())}, 1);
  rows.key_mask = whole_of_rows(own, 1, rows.sequence);
  return rows;
}

std::shared_ptr<Hooked<Norm>> register_head_norm(torch::nn::Module& module, const char* name, int64_t head_dim) {
  const NormSpec spec{.class_name = "RMSNorm", .width = head_dim, .eps = kJointEps};
  return module.register_module(name, std::make_shared<Hooked<Norm>>(spec));
}

at::Tensor joint_mix(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const JointPass& pass) {
  return full_self_attention(turn_neighbours(q, pass.turns), turn_neighbours(k, pass.turns), v, pass.key_mask,
                             pass.sequence)
      .flatten(2);
}

std::vector<at::Tensor> modulations(const at::Tensor& output, int64_t count) {
  return output.to(at::kFloat).unsqueeze(1).chunk(count, -1);
}

JointAttention::JointAttention(std::string class_name, const JointSizes& sizes)
    : class_name_(std::move(class_name)), num_heads_(sizes.num_heads) {
  const auto options = xavier_linear(sizes.width(), sizes.width());
  const auto linear = [&](const char* name) {
    return register_module(name, std::make_shared<Hooked<Linear>>(options));
  };
  image_ = {.of = {linear("to_q"), linear("to_k"), linear("to_v")},
            .norms = {register_head_norm(*this, "norm_q", sizes.head_dim),
                      register_head_norm(*this, "norm_k", sizes.head_dim)}};
  text_ = {.of = {linear("add_q_proj"), linear("add_k_proj"), linear("add_v_proj")},
           .norms = {register_head_norm(*this, "norm_added_q", sizes.head_dim),
                     register_head_norm(*this, "norm_added_k", sizes.head_dim)}};
  to_out_ = register_linear_at(*this, "to_out.0", options);
  to_add_out_ = linear("to_add_out");
}

Streams JointAttention::forward(const Streams& normed, const JointPass& pass) {
  const auto part = [&](const Projections& projections, const at::Tensor& x, size_t i) {
    const auto heads = projections.of[i]->forward(x).unflatten(-1, {num_heads_, -1});
    return i < 2 ? projections.norms[i]->forward(heads) : heads;
  };
  std::array<at::Tensor, 3> both;
  for (size_t i = 0; i < 3; ++i) both[i] = at::cat({part(text_, normed.text, i), part(image_, normed.image, i)}, 1);
  const auto mixed = joint_mix(both[0], both[1], both[2], pass);
  const int64_t text = normed.text.size(1);
  return {.image = to_out_->forward(mixed.narrow(1, text, normed.image.size(1))),
          .text = to_add_out_->forward(mixed.narrow(1, 0, text))};
}

JointBlock::JointBlock(const JointBlockNames& names, const JointSizes& sizes) : class_name_(names.block) {
  const int64_t width = sizes.width();
  const Linear::Options modulation{.in = width, .out = 6 * width, .bias = true, .init_scale = 0};
  image_modulation_ = register_linear_at(*this, names.image_modulation, modulation);
  text_modulation_ = register_linear_at(*this, names.text_modulation, modulation);
  attn_ = register_module("attn", std::make_shared<Hooked<JointAttention>>(names.attention, sizes));
  const auto mlp = [&](const std::string& name) {
    return register_module(name, std::make_shared<Hooked<FeedForward>>(width, 4 * width, width, Activation::kGeluTanh));
  };
  image_mlp_ = mlp(names.image_mlp);
  text_mlp_ = mlp(names.text_mlp);
}

Streams JointBlock::forward(const Streams& hidden, const JointPass& pass) {
  const auto of_image = modulations(image_modulation_->forward(pass.time), 6);
  const auto of_text = modulations(text_modulation_->forward(pass.time), 6);
  const auto normed = [](const at::Tensor& x, const std::vector<at::Tensor>& changes, size_t first) {
    return modulated_norm(x, {changes[first + 1] + 1, changes[first]}, {}, kJointEps);
  };
  const auto mixed = attn_->forward(Streams{normed(hidden.image, of_image, 0), normed(hidden.text, of_text, 0)}, pass);
  const auto image = gated_sum(hidden.image, mixed.image, of_image[2], {});
  const auto text = gated_sum(hidden.text, mixed.text, of_text[2], {});
  return {.image = gated_sum(image, image_mlp_->forward(normed(image, of_image, 3)), of_image[5], {}),
          .text = gated_sum(text, text_mlp_->forward(normed(text, of_text, 3)), of_text[5], {})};
}

}  // namespace megashard
