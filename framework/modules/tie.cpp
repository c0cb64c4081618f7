#include "framework/modules/tie.h"

namespace megashard {
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
