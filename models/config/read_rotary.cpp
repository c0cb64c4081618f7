#include "models/config/read_rotary.h"

#include <cmath>

namespace megashard {
namespace {

using Json = nlohmann::ordered_json;
using Kind = RotaryConfig::Kind;

constexpr const char* kParameters = "rope_parameters";
constexpr const char* kScaling = "rope_scaling";
constexpr const char* kOriginal = "original_max_position_embeddings";
constexpr const char* kPart = "partial_rotary_factor";

/// An object of position parameters, completed by keys outside of it.
struct Rope {
  std::string place;  ///< name in messages
  Json keys = Json::object();
};

bool is_same_type(const Json& a, const Json& b) {
  const auto plain = [](const Json& type) { return type == "mrope" ? Json("default") : type; };
  return plain(a) == plain(b);
}

/// Renames the old key `type` to rope_type. Returns an empty Rope for null.
Rope read_object(const HfConfig& config, const std::string& place, const Json* object) {
  Rope rope{place};
  if (object == nullptr) return rope;
  TORCH_CHECK(object->is_object(), config.path(), ": ", place, " must be an object, got ", object->dump());
  for (const auto& [key, value] : object->items()) {
    TORCH_CHECK(!value.is_object() && !key.ends_with("_attention"), config.path(), ": ", place, " has an object ", key,
                ", but all layers of this family have the same positions: put its keys into ", place, " itself");
    if (key != "type") rope.keys[key] = value;
  }
  const auto old = object->find("type");
  if (old == object->end()) return rope;
  const auto type = rope.keys.find("rope_type");
  TORCH_CHECK(type == rope.keys.end() || is_same_type(*type, *old), config.path(), ": ", place, " says rope_type ",
              type == rope.keys.end() ? "" : type->dump(), " and type ", old->dump(),
              ", which mean the same: keep the one that is right");
  if (type == rope.keys.end()) rope.keys["rope_type"] = *old;
  return rope;
}

/// Completes `rope` with a value at the top level of config.json, or `fallback`. Throws if both places differ.
void take_from_above(const HfConfig& config, Rope& rope, const char* key, const char* key_above, const Json& fallback) {
  const auto* above = config.find(key_above);
  const auto own = rope.keys.find(key);
  if (own == rope.keys.end()) {
    TORCH_CHECK(!config.is_null(key_above) || fallback.is_null(), config.path(), ": ", key_above,
                " is null: write its number, or take it out");
    if (above != nullptr || !fallback.is_null()) rope.keys[key] = above != nullptr ? *above : fallback;
    return;
  }
  TORCH_CHECK(above == nullptr || *above == *own, config.path(), ": ", key_above, " says ", above->dump(), " and ",
              rope.place, ".", key, " says ", own->dump(), ": keep the one that is right");
}

void complete(const HfConfig& config, Rope& rope, const char* theta_above, double theta) {
  if (!rope.keys.contains("rope_type")) rope.keys["rope_type"] = "default";
  take_from_above(config, rope, "rope_theta", theta_above, theta);
}

/// Throws unless `other` has the same values, also for keys that only it has.
void require_same(const HfConfig& config, const Rope& rope, const Rope& other, bool all_of_rope) {
  std::vector<std::string> differences;
  const auto add = [&](const std::string& key, const Json& of_rope, const Json& of_other) {
    const auto text = [](const Json& value) {
      return value.is_null() ? "nothing" : value.is_array() ? "a list" : value.dump();
    };
    differences.push_back(key + " " + text(of_rope) + " and " + text(of_other));
  };
  for (const auto& [key, value] : other.keys.items()) {
    const auto own = rope.keys.value(key, Json());
    if (key == "rope_type" ? !is_same_type(own, value) : own != value) add(key, own, value);
  }
  for (const auto& [key, value] : rope.keys.items()) {
    if (all_of_rope && !other.keys.contains(key)) add(key, value, Json());
  }
  TORCH_CHECK(differences.empty(), config.path(), ": ", rope.place, " and ", other.place,
              " describe the same positions, and not alike: they say ", c10::Join("; ", differences),
              ". Put what is meant, rope_theta included, into one of them and take the other out");
}

/// Reads numbers of a Rope.
class RopeReader {
 public:
  RopeReader(const HfConfig& config, const Rope& rope) : config_(config), rope_(rope) {}

  bool has(const char* key) const { return rope_.keys.contains(key); }
  double get(const char* key, double fallback) const {
    const auto* value = find(key);
    TORCH_CHECK(value == nullptr || value->is_number(), config_.path(), ": ", rope_.place, ".", key,
                " must be a number, got ", value->dump());
    return value == nullptr ? fallback : value->get<double>();
  }
  double more_than(double least, const char* key) const {
    TORCH_CHECK(find(key) != nullptr, config_.path(), ": ", rope_.place, ".", key,
                " is missing; take the file that was published with the model");
    const double value = get(key, 0);
    TORCH_CHECK(value > least, config_.path(), ": ", rope_.place, ".", key, " must be more than ", least, ", got ",
                value);
    return value;
  }
  double positive(const char* key) const { return more_than(0, key); }
  /// A list with one number per channel pair.
  std::vector<double> divisors(const char* key, int64_t pairs) const {
    const auto* list = HfConfig::find(rope_.keys, key);
    bool fits = list != nullptr && list->is_array() && std::ssize(*list) == pairs;
    for (size_t i = 0; fits && i < list->size(); ++i) fits = (*list)[i].is_number() && (*list)[i].get<double>() > 0;
    TORCH_CHECK(fits, config_.path(), ": ", rope_.place, ".", key, " must be a list of ", pairs,
                " positive numbers, one for each pair of a head's channels");
    return list->get<std::vector<double>>();
  }
  const Json* find(const char* key) const { return HfConfig::find(rope_.keys, key); }
  std::string place() const { return config_.path() + ": " + rope_.place; }

 private:
  const HfConfig& config_;
  const Rope& rope_;
};

void read_yarn(const RopeReader& rope, double max_positions, RotaryConfig& rotary) {
  const bool is_implied = rope.has("factor") && rope.find("factor") == nullptr;  // null
  rotary.factor = is_implied ? max_positions / rotary.original_max_positions : rope.positive("factor");
  const auto magnitude = [&](double scale) { return yarn_mscale(rotary.factor, scale); };
  const double scale = rope.get("mscale", 0), scale_all = rope.get("mscale_all_dim", 0);
  rotary.magnitude = rope.get("attention_factor",
                              scale != 0 && scale_all != 0 ? magnitude(scale) / magnitude(scale_all) : magnitude(1));
  const auto turns = [&](const char* key, double fallback) {  // transformers also treats 0 as absent
    return rope.get(key, 0) == 0 ? fallback : rope.positive(key);
  };
  rotary.beta_fast = turns("beta_fast", 32);
  rotary.beta_slow = turns("beta_slow", 1);
  const auto* truncate = rope.find("truncate");
  rotary.truncate = !rope.has("truncate") || (truncate != nullptr && *truncate == true);
}

void read_longrope(const RopeReader& rope, double max_positions, int64_t pairs, RotaryConfig& rotary) {
  rotary.short_factor = rope.divisors("short_factor", pairs);
  rotary.long_factor = rope.divisors("long_factor", pairs);
  const double original = rotary.original_max_positions;
  rotary.factor = rope.find("factor") == nullptr ? max_positions / original : rope.positive("factor");
  const double magnitude = rotary.factor <= 1 ? 1.0 : std::sqrt(1 + std::log(rotary.factor) / std::log(original));
  rotary.magnitude = rope.get("attention_factor", magnitude);
}

std::vector<int64_t> read_sections(const HfConfig& config, const Json& section) {
  bool fits = section.is_array() && section.size() == 3;
  for (size_t i = 0; fits && i < 3; ++i) fits = section[i].is_number_integer() && section[i].get<int64_t>() >= 0;
  TORCH_CHECK(fits, config.path(), ": mrope_section must be three counts of channel pairs, got ", section.dump());
  return section.get<std::vector<int64_t>>();
}

/// The part of a head's channels that turns, an even number of them.
double read_part(const RopeReader& rope, int64_t head_dim) {
  const double part = rope.positive(kPart);
  const auto channels = static_cast<int64_t>(static_cast<double>(head_dim) * part);
  TORCH_CHECK(part <= 1 && channels > 0 && channels % 2 == 0, rope.place(), ".", kPart, " ", part, " of ", head_dim,
              " channels of a head must be an even number of them, and not more than all");
  return part;
}

RotaryConfig read_rope(const HfConfig& config, Rope rope, RotaryConfig rotary, const DecoderConfig& network,
                       bool partial = false) {
  const auto max_positions = static_cast<double>(network.max_positions);
  if (partial) take_from_above(config, rope, kPart, kPart, rotary.fraction);
  const RopeReader reader(config, rope);
  rotary.original_max_positions = max_positions;
  rotary.theta = reader.positive("rope_theta");
  if (partial) rotary.fraction = read_part(reader, network.head_dim);
  for (const auto* part : {config.find(kPart), reader.find(kPart)}) {
    config.require_computed(partial || part == nullptr || *part == 1.0, kPart, " ", part ? part->dump() : "",
                            ": this family turns all channels of a head, and transformers ignores the key or fails; "
                            "take it out");
  }
  const auto* name = reader.find("rope_type");
  TORCH_CHECK(name != nullptr && name->is_string(), config.path(), ": ", rope.place, ".rope_type must be a name, got ",
              rope.keys["rope_type"].dump());
  const auto type = name->get<std::string>();
  const bool has_axes = !rotary.mrope_section.empty();
  const auto* section = reader.find("mrope_section");
  if (has_axes && section != nullptr) rotary.mrope_section = read_sections(config, *section);
  const bool has_original = type == "llama3" || type == "yarn" || type == "longrope";
  if (has_original) take_from_above(config, rope, kOriginal, kOriginal, max_positions);
  if (type == "default" || (type == "mrope" && has_axes) || !config.describes_computation()) return rotary;
  rotary.mscale_all_dim = reader.get("mscale_all_dim", 0);
  if (has_original) rotary.original_max_positions = reader.more_than(type == "longrope" ? 1 : 0, kOriginal);
  if (type == "linear") {
    rotary.kind = Kind::kLinear;
    rotary.factor = reader.positive("factor");
  } else if (type == "llama3") {
    rotary.kind = Kind::kLlama3;
    rotary.factor = reader.positive("factor");
    rotary.low_freq_factor = reader.positive("low_freq_factor");
    rotary.high_freq_factor = reader.positive("high_freq_factor");
  } else if (type == "yarn") {
    rotary.kind = Kind::kYarn;
    read_yarn(reader, max_positions, rotary);
  } else if (type == "dynamic") {
    rotary.kind = Kind::kDynamic;
    rotary.factor = reader.positive("factor");
    TORCH_CHECK(network.head_dim > 2 && max_positions > 0, config.path(), ": rope_type dynamic of ", rope.place,
                " needs heads of more than 2 channels and max_position_embeddings");
  } else if (type == "longrope") {
    rotary.kind = Kind::kLongrope;
    read_longrope(reader, max_positions,
                  static_cast<int64_t>(static_cast<double>(network.head_dim) * rotary.fraction) / 2, rotary);
  } else {
    TORCH_CHECK(false, config.path(), ": ", rope.place, ".rope_type ", type,
                " is not supported; known are default, linear, llama3, yarn, dynamic and longrope");
  }
  return rotary;
}

}  // namespace

RotaryConfig read_rotary(const HfConfig& config, const RotaryConfig& defaults, const DecoderConfig& network,
                         bool partial) {
  auto parameters = read_object(config, kParameters, config.find(kParameters));
  auto scaling = read_object(config, kScaling, config.find(kScaling));
  const bool both = !parameters.keys.empty() && !scaling.keys.empty();
  auto& chosen = scaling.keys.empty() ? parameters : scaling;  // as transformers
  complete(config, chosen, "rope_theta", defaults.theta);
  if (both) {
    complete(config, parameters, "rope_theta", defaults.theta);
    require_same(config, parameters, scaling, /*all_of_rope=*/true);
  }
  return read_rope(config, std::move(chosen), defaults, network, partial);
}

std::pair<RotaryConfig, RotaryConfig> read_rotary_by_layer(const HfConfig& config, double full_theta,
                                                           const char* sliding_key_above, double sliding_theta,
                                                           const DecoderConfig& network) {
  const std::string full_key = "full_attention", sliding_key = "sliding_attention";
  const auto* parameters = config.find(kParameters);
  if (parameters != nullptr) {
    bool fits = parameters->is_object();
    for (const auto& [key, value] : parameters->items()) fits = fits && (key == full_key || key == sliding_key);
    TORCH_CHECK(fits, config.path(),
                ": rope_parameters of this family has objects full_attention and "
                "sliding_attention and nothing else, got ",
                parameters->dump(), ": put its keys into one of them");
  }
  const auto of_layers = [&](const std::string& key) {
    const auto* object = parameters == nullptr ? nullptr : HfConfig::find(*parameters, key.c_str());
    return read_object(config, std::string(kParameters) + "." + key, object);
  };
  auto full = of_layers(full_key), sliding = of_layers(sliding_key);
  auto scaling = read_object(config, kScaling, config.find(kScaling));
  if (parameters == nullptr && !scaling.keys.empty()) {
    full = scaling;
    const auto& given = *config.find(kScaling);
    config.require_computed(!given.contains("type") || given.contains("rope_type") || given["type"] == "default",
                            "rope_scaling.type ", given.value("type", Json()).dump(),
                            ": transformers keeps this family's default positions then; call it rope_type, or take "
                            "rope_scaling out");
  }
  complete(config, full, "rope_theta", full_theta);
  complete(config, sliding, sliding_key_above, sliding_theta);
  if (parameters != nullptr) require_same(config, full, scaling, /*all_of_rope=*/false);
  config.require_computed(full.keys.value("truncate", Json(true)) == true, full.place, ".truncate ",
                          full.keys.value("truncate", Json()).dump(),
                          " is not read there by transformers, which truncates; take it out");
  return {read_rope(config, std::move(full), {}, network), read_rope(config, std::move(sliding), {}, network)};
}

RotaryConfig read_rotary_of(const HfConfig& config, const char* layers, RotaryConfig defaults) {
  for (const char* key : {"rope_theta", kScaling, kPart})
    config.require_computed(
        config.find(key) == nullptr && !config.is_null(key), key,
        " is not read by transformers for this family; put it into rope_parameters, or take it out");
  const auto* parameters = config.find(kParameters);
  if (parameters == nullptr) return defaults;
  const Rope rope = read_object(config, std::string(kParameters) + "." + layers, HfConfig::find(*parameters, layers));
  const RopeReader reader(config, rope);
  const auto type = rope.keys.value("rope_type", Json("default"));
  TORCH_CHECK(type == "default" || type == "proportional", reader.place(), ".rope_type ", type.dump(),
              " is not supported; known are default and proportional");
  const double part = reader.get(kPart, 1);
  TORCH_CHECK(type == "proportional" || part == 1, reader.place(), ".", kPart, " belongs to rope_type proportional");
  TORCH_CHECK(part >= 0 && part <= 1, reader.place(), ".", kPart, " must be from 0 to 1, got ", part);
  defaults.kind = type == "default" ? Kind::kDefault : Kind::kProportional;
  defaults.fraction = part;
  defaults.theta = reader.positive("rope_theta");
  defaults.factor = type == "proportional" && reader.has("factor") ? reader.positive("factor") : 1;
  return defaults;
}

const nlohmann::ordered_json& position_keys(const HfConfig& config) {
  static const Json none = Json::object();
  const auto* scaling = config.find(kScaling);
  const auto* keys = scaling != nullptr && !scaling->empty() ? scaling : config.find(kParameters);
  return keys == nullptr ? none : *keys;
}

HfConfig with_yarn(const HfConfig& config, const YarnDefaults& defaults) {
  if (config.find(kParameters) != nullptr || config.find(kScaling) != nullptr) return config;
  auto json = config.json();
  json[kParameters] = {{"rope_type", "yarn"},
                       {"rope_theta", defaults.theta},
                       {"factor", defaults.factor},
                       {kOriginal, defaults.original_max_positions},
                       {"mscale", 1.0},
                       {"mscale_all_dim", 1.0},
                       {"llama_4_scaling_beta", 0.1}};
  using Purpose = HfConfig::Purpose;
  return {std::move(json), config.path(), config.describes_computation() ? Purpose::kComputation : Purpose::kWeights};
}

QueryTemperature read_query_temperature(const HfConfig& config) {
  const auto& keys = position_keys(config);
  const auto need = [&](const char* key) {
    TORCH_CHECK(HfConfig::find(keys, key) != nullptr, config.path(), ": ", key,
                " is missing in rope_parameters (or rope_scaling, where that has keys); this family's queries need it");
    return config.need<double>(keys, key);
  };
  QueryTemperature temperature{.beta = need("llama_4_scaling_beta")};
  temperature.length = config.find(kOriginal) == nullptr ? need(kOriginal) : config.need<double>(kOriginal);
  TORCH_CHECK(temperature.length > 0, config.path(), ": ", kOriginal, " must be positive, got ", temperature.length);
  return temperature;
}

}  // namespace megashard
