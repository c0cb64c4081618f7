#include "models/hugging_face/weight_names.h"

namespace megashard {
namespace {

const std::string kVisual = "visual.", kText = "language_model.", kModel = "model.";

std::string published_qwen2_5_vl(const std::string& name) {
  if (name.starts_with(kModel + kVisual)) return name.substr(kModel.size());
  if (name.starts_with(kModel + kText)) return kModel + name.substr((kModel + kText).size());
  return name;
}

std::string parameter_of_qwen2_5_vl(const std::string& name) {
  if (name.starts_with(kVisual)) return kModel + name;
  const bool text =
      name.starts_with(kModel) && !name.starts_with(kModel + kText) && !name.starts_with(kModel + kVisual);
  return text ? kModel + kText + name.substr(kModel.size()) : name;
}

}  // namespace

WeightRenaming to_published_names(const std::string& model_type) {
  return model_type == "qwen2_5_vl" ? published_qwen2_5_vl : WeightRenaming();
}

WeightRenaming to_parameter_names(const std::string& model_type) {
  return model_type == "qwen2_5_vl" ? parameter_of_qwen2_5_vl : WeightRenaming();
}

}  // namespace megashard
