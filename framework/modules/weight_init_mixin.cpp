#include "framework/modules/weight_init_mixin.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cctype>
#include <string>

#include "parallel/fsdp/hooked_module.h"

namespace megashard {
namespace {

bool is_norm(const torch::nn::Module& module) {
  const auto* hooked = dynamic_cast<const HookedModule*>(&module);
  auto name = hooked != nullptr ? hooked->class_name() : detail::demangled_class_name(typeid(module).name());
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name.find("norm") != std::string::npos;
}

/// True if other modules have initialised all parameters: a tied head follows its embedding.
bool all_done(const torch::nn::Module& module, const std::unordered_set<const void*>& done) {
  const auto own = module.named_parameters(/*recurse=*/false);
  return !own.is_empty() && std::all_of(own.begin(), own.end(), [&](const auto& item) {
    return done.contains(item.value().unsafeGetTensorImpl());
  });
}

}  // namespace

void WeightInitMixin::init_weights() {
  auto* const self = dynamic_cast<torch::nn::Module*>(this);
  TORCH_CHECK(self != nullptr, "init_weights: a class that mixes in WeightInitMixin must be a torch::nn::Module too");
  const at::NoGradGuard no_grad;
  std::unordered_set<const void*> done;
  visit(*self, done);
}

void WeightInitMixin::visit(torch::nn::Module& module, std::unordered_set<const void*>& done) {
  for (const auto& child : module.named_children()) visit(*child.value(), done);
  if (!is_initialized(module) && !all_done(module, done)) _init_weights(module, weight_init_.std);
  mark_initialized(module);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) done.insert(item.value().unsafeGetTensorImpl());
}

void WeightInitMixin::_init_weights(torch::nn::Module& module, double std) {
  if (auto* const own = dynamic_cast<SelfInitializing*>(&module)) {
    own->init_own_weights({.std = std, .generator = weight_init_.generator});
    return;
  }
  if (auto* const attention = dynamic_cast<torch::nn::MultiheadAttentionImpl*>(&module)) {
    attention->_reset_parameters();
    return;
  }
  if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module)) {
    if (embedding->options.padding_idx().has_value()) return;
  }
  const bool norm = is_norm(module);
  for (auto& item : module.named_parameters(/*recurse=*/false)) {
    auto& parameter = item.value();
    if (!parameter.defined()) continue;
    if (item.key() == "bias") {
      parameter.zero_();
    } else if (norm && item.key() == "weight") {
      parameter.fill_(1);
    } else {
      parameter.normal_(0, std, weight_init_.generator);
    }
  }
}

namespace {

struct Registered : torch::nn::Module {  // gives access to a protected member of any module
  static auto parameters_of(torch::nn::Module& module) { return &(module.*(&Registered::parameters_)); }
};

}  // namespace

void tie_parameter(torch::nn::Module& module, at::Tensor& member, const at::Tensor& shared) {
  TORCH_CHECK(member.defined() && shared.defined() && member.sizes() == shared.sizes(),
              "tied parameters must have the same sizes, got ", member.defined() ? member.sizes() : at::IntArrayRef(),
              " and ", shared.defined() ? shared.sizes() : at::IntArrayRef());
  for (auto& item : *Registered::parameters_of(module)) {
    if (!item.value().is_same(member)) continue;
    item.value() = shared;
    member = shared;
    return;
  }
  TORCH_CHECK(false, "the tensor to tie is not a registered parameter of ", module.name());
}

}  // namespace megashard
