#include "framework/modules/model_registry.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <filesystem>
#include <optional>

#include "checkpoint/hugging_face/hf_config.h"
#include "framework/arguments/arguments.h"
#include "framework/arguments/nearest_name.h"

namespace megashard {
namespace {

/// The registered name for config.json, or its first choice if none is registered.
template <class Entry>
std::string name_in_config(const HfConfig& config, const std::map<std::string, Entry>& known) {
  std::vector<std::string> wanted;
  if (const auto* found = config.find("architectures"); found != nullptr && found->is_array() && !found->empty()) {
    if (found->front().is_string()) wanted.push_back(found->front());
  }
  for (const char* key : {"model_type", "_class_name"}) {
    if (const auto* found = config.find(key); found != nullptr && found->is_string()) wanted.push_back(*found);
  }
  TORCH_CHECK(!wanted.empty(), config.path(),
              " has neither architectures, model_type nor _class_name: the model cannot be chosen");
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

void ModelRegistry::add(std::string name, ConfigFactory factory) {
  const auto [position, inserted] = factories_.emplace(std::move(name), std::move(factory));
  TORCH_CHECK(inserted, "a model named ", position->first, " is registered already");
}

void ModelRegistry::add(std::string name, Factory factory) {
  add(std::move(name),
      [make = std::move(factory)](const Arguments& arguments, const HfConfig*) { return make(arguments); });
}

void ModelRegistry::add(std::string name, PluginFactory factory) {
  add(std::move(name), [make = std::move(factory)](const Arguments& arguments, const HfConfig*) {
    return make(ArgumentView(arguments));
  });
}

std::vector<std::string> ModelRegistry::names() const { return names_of(factories_); }

void ModelRegistry::add_layout(std::string name, LayoutFactory factory) {
  const auto [position, inserted] = layouts_.emplace(std::move(name), std::move(factory));
  TORCH_CHECK(inserted, "a Megatron layout for ", position->first, " is registered already");
}

MegatronLayout ModelRegistry::layout(const std::filesystem::path& hf_dir, int64_t vocab_divisor) const {
  TORCH_CHECK(std::filesystem::exists(hf_dir / "config.json"), "there is no ", (hf_dir / "config.json").string(),
              ", which says how the weights lie in Megatron's model");
  const auto config = HfConfig::of_model(hf_dir.string());
  const auto name = name_in_config(config, layouts_);
  const auto found = layouts_.find(name);
  TORCH_CHECK(found != layouts_.end(), "there is no Megatron layout for architecture ", name,
              "; there are ones for: ", c10::Join(", ", names_of(layouts_)));
  return found->second(config, vocab_divisor);
}

std::shared_ptr<MultiModalModule> ModelRegistry::create(const Arguments& arguments, std::string name,
                                                        const HfConfig* config) const {
  std::optional<HfConfig> own;
  if (config == nullptr && arguments.hf_model) config = &own.emplace(HfConfig::of_model(*arguments.hf_model));
  const bool is_of_user = !name.empty();  // not from config.json, whose names are those of other models
  if (name.empty()) name = config != nullptr ? name_in_config(*config, factories_) : kModelOfFlags;
  const auto found = factories_.find(name);
  TORCH_CHECK_VALUE(found != factories_.end(), "no model is registered for architecture ", name,
                    "; known are: ", c10::Join(", ", names()), is_of_user ? did_you_mean(name, names()) : "");
  return found->second(arguments, config);
}

}  // namespace megashard
