#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace megashard {

/// A value: config.json, with error messages for missing fields. A null field counts as absent if transformers' classes
/// allow null, and is an error otherwise, as in transformers.
class HfConfig {
 public:
  enum class Purpose {
    kComputation,
    kWeights,  ///< only their names and sizes: unsupported computations do not matter
  };

  /// `path` is used in messages.
  HfConfig(nlohmann::ordered_json json, std::string path, Purpose purpose = Purpose::kComputation)
      : json_(std::make_shared<const nlohmann::ordered_json>(std::move(json))),
        path_(std::move(path)),
        purpose_(purpose) {}
  /// Reads config.json of a Hugging Face model directory. Throws an error with the remedy for a directory without one
  /// (PEFT adapters, GGUF files, Meta's format, checkpoints of a run, the hub's cache) and for models with quantised
  /// weights.
  static HfConfig of_model(const std::string& directory);

  const nlohmann::ordered_json& json() const { return *json_; }
  const nlohmann::ordered_json* find(const char* key) const { return find(*json_, key); }
  static const nlohmann::ordered_json* find(const nlohmann::ordered_json& object, const char* key) {
    const auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }
  /// The object at that key (text_config); nullopt if it is absent or not an object.
  std::optional<HfConfig> object(const char* key) const {
    const auto* value = find(key);
    if (value == nullptr || !value->is_object()) return std::nullopt;
    auto part = *this;
    part.json_ = {json_, value};
    return part;
  }
  /// True if the field is null.
  bool is_null(const char* key) const { return json_->contains(key) && json_->at(key).is_null(); }

  template <class T>
  T get(const char* key, T fallback) const {
    TORCH_CHECK(!is_null(key), path(), ": ", key, " is null: write its value, or take it out");
    return get_or_null(key, fallback);
  }
  /// Treats null as absent.
  template <class T>
  T get_or_null(const char* key, T fallback) const {
    return get(*json_, key, fallback);
  }
  /// The value of either key. Throws if both are there and differ.
  template <class T>
  T get_either(const char* key, const char* other, T fallback) const {
    const auto second = get(other, fallback), first = get(key, second);
    TORCH_CHECK(first == second || find(other) == nullptr, path(), ": ", key, " says ", find(key)->dump(), " and ",
                other, " says ", find(other)->dump(), ": keep the one that is right");
    return first;
  }
  template <class T>
  T get(const nlohmann::ordered_json& object, const char* key, T fallback) const {
    const auto* value = find(object, key);
    return value == nullptr ? fallback : convert<T>(*value, key);
  }
  template <class T>
  T need(const nlohmann::ordered_json& object, const char* key) const {
    const auto* value = find(object, key);
    TORCH_CHECK(value != nullptr, path(), ": ", key, " is missing; take the file that was published with the model");
    return convert<T>(*value, key);
  }
  template <class T>
  T need(const char* key) const {
    return need<T>(*json_, key);
  }

  bool describes_computation() const { return purpose_ == Purpose::kComputation; }
  /// Throws the error for an unsupported setting, if `purpose` is computation.
  template <class... Words>
  void require_computed(bool is_computed, const Words&... message) const {
    TORCH_CHECK(is_computed || !describes_computation(), path(), ": ", c10::str(message...));
  }

  const std::string& path() const { return path_; }

 private:
  template <class T>
  T convert(const nlohmann::ordered_json& value, const char* key) const {
    bool fits = value.is_string();
    if constexpr (std::is_same_v<T, bool>) fits = value.is_boolean();
    if constexpr (std::is_same_v<T, double>) fits = value.is_number();
    if constexpr (std::is_same_v<T, int64_t>) fits = value.is_number_integer();
    if constexpr (std::is_same_v<T, std::vector<int64_t>>)
      fits = value.is_array() &&
             std::all_of(value.begin(), value.end(), [](const auto& each) { return each.is_number_integer(); });
    if constexpr (std::is_same_v<T, std::vector<std::string>>)
      fits = value.is_array() &&
             std::all_of(value.begin(), value.end(), [](const auto& each) { return each.is_string(); });
    TORCH_CHECK(fits, path(), ": ", key, " has an unexpected type: ", value.dump());
    return value.get<T>();
  }

  std::shared_ptr<const nlohmann::ordered_json> json_;  // may be a part of the file
  std::string path_;
  Purpose purpose_;
};

}  // namespace megashard
