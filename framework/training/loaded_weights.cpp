#include "framework/training/loaded_weights.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include "parallel/collectives/agreement.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

bool is_finite(const at::Tensor& values) {
  // One pass finds out that all is well; sums of large finite values may overflow.
  return std::isfinite(values.sum().item<double>()) || values.isfinite().all().item<bool>();
}

std::string first_names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string list;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) list += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kShown) list += " and " + std::to_string(names.size() - kShown) + " more";
  return list;
}

std::string list_nonfinite_weights(const torch::nn::Module& model, const ProcessGroupPtr& group) {
  const c10::NoGradGuard no_grad;
  const auto of_ranks = gather_or_throw(group, [&] {
    std::string names;
    for (const auto& parameter : model.named_parameters()) {
      if (!is_finite(reshard_and_view(parameter.value()).local)) names += parameter.key() + "\n";
    }
    return names;
  });
  std::vector<std::string> names;
  for (const auto& of_rank : of_ranks) {
    std::istringstream lines(of_rank);
    for (std::string name; std::getline(lines, name);) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  if (names.empty()) return "";
  return first_names(names) + (names.size() == 1 ? " holds" : " hold") + " NaN or infinity";
}

void round_weights_to_bf16(const torch::nn::Module& model) {
  const c10::NoGradGuard no_grad;
  for (const auto& parameter : model.parameters()) {
    at::Tensor local = reshard_and_view(parameter).local.detach();
    if (local.scalar_type() == at::kFloat) local.copy_(local.to(at::kBFloat16));
  }
}

}  // namespace megashard
