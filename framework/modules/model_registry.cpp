#include "framework/modules/model_registry.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face/hf_files.h"
#include "framework/arguments/arguments.h"
#include "framework/arguments/nearest_name.h"

namespace megashard {
namespace {

/// The registered name for config.json, or its first choice if none is registered.
template <class Entry>
std::string name_in_config(const std::filesystem::path& hf_dir, const std::map<std::string, Entry>& known) {
  const auto config = need_hf_config(hf_dir.string());
  std::vector<std::string> wanted;
  if (const auto found = config.find("architectures"); found != config.end() && found->is_array() && !found->empty()) {
    if (found->front().is_string()) wanted.push_back(found->front());
  }
  if (const auto found = config.find("model_type"); found != config.end() && found->is_string())
    wanted.push_back(*found);
  TORCH_CHECK(!wanted.empty(), (hf_dir / "config.json").string(),
              " has neither architectures nor model_type: the model cannot be chosen");
  for (const auto& name : wanted) {
    if (known.contains(name)) return name;
  }
  return wanted.front();
}

template <class Entry>
std::vector<std::string> names_of(const std::map<std::string, Entry>& entries) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries) names.push_back(name);
  return names;
}

}  // namespace

void ModelRegistry::add(std::string name, Factory factory) {
  const auto [position, inserted] = factories_.emplace(std::move(name), std::move(factory));
  TORCH_CHECK(inserted, "a model named ", position->first, " is registered already");
}

void ModelRegistry::add(std::string name, PluginFactory factory) {
  add(std::move(name),
      [make = std::move(factory)](const Arguments& arguments) { return make(ArgumentView(arguments)); });
}

std::vector<std::string> ModelRegistry::names() const { return names_of(factories_); }

void ModelRegistry::add_layout(std::string name, LayoutFactory factory) {
  const auto [position, inserted] = layouts_.emplace(std::move(name), std::move(factory));
  TORCH_CHECK(inserted, "a Megatron layout for ", position->first, " is registered already");
}

WeightLayout ModelRegistry::layout(const std::filesystem::path& hf_dir, int64_t vocab_divisor) const {
  TORCH_CHECK(std::filesystem::exists(hf_dir / "config.json"), "there is no ", (hf_dir / "config.json").string(),
              ", which says how the weights lie in Megatron's model");
  const auto name = name_in_config(hf_dir, layouts_);
  const auto found = layouts_.find(name);
  TORCH_CHECK(found != layouts_.end(), "there is no Megatron layout for architecture ", name,
              "; there are ones for: ", c10::Join(", ", names_of(layouts_)));
  return found->second(hf_dir, vocab_divisor);
}

std::shared_ptr<MultiModalModule> ModelRegistry::create(const Arguments& arguments, std::string name) const {
  const bool is_of_user = !name.empty();  // not from config.json, whose names are those of other models
  if (name.empty()) name = arguments.hf_model ? name_in_config(*arguments.hf_model, factories_) : kModelOfFlags;
  const auto found = factories_.find(name);
  TORCH_CHECK_VALUE(found != factories_.end(), "no model is registered for architecture ", name,
                    "; known are: ", c10::Join(", ", names()), is_of_user ? did_you_mean(name, names()) : "");
  return found->second(arguments);
}

}  // namespace megashard
