#include "launch/plan/device_file.h"

#include <c10/util/StringUtil.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "framework/arguments/argument_value.h"
#include "framework/arguments/nearest_name.h"
#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"
#include "launch/plan/plan_report.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

/// Folder of the devices installed with the program.
fs::path own_devices() {
  Dl_info here;
  TORCH_INTERNAL_ASSERT(dladdr(reinterpret_cast<void*>(&own_devices), &here) != 0);
  return fs::path(here.dli_fname).parent_path() / "plan" / "devices";
}

fs::path file_of(const std::string& file_or_name) {
  std::error_code ignored;
  if (fs::is_regular_file(file_or_name, ignored)) return file_or_name;
  std::string name = file_or_name;
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::tolower(letter); });
  const auto own = own_devices() / (name + ".yaml");
  if (fs::is_regular_file(own, ignored)) return own;
  const auto names = device_names();
  const auto hint = did_you_mean(name, names);
  throw UsageError("the device " + file_or_name + " is neither a file nor one of " + c10::Join(", ", names) +
                   (hint.empty() ? "; docs/plan.md shows what stands in such a file." : hint));
}

double positive(const YamlValue& value) {
  const double number = value.number();
  if (!(number > 0)) value.expected("a number above 0");
  return number;
}

std::vector<DeviceModel::AttentionShare> attention_shares(const std::string& source, const YamlValue& value) {
  if (!value.node.IsMap() || value.node.size() == 0) value.expected("a map of channels to [forward, backward]");
  std::map<int64_t, DeviceModel::AttentionShare> shares;
  for (const auto& item : value.node) {
    const std::string name = value.key + "." + item.first.as<std::string>();
    const YamlValue share{source, name, item.second};
    const auto channels = parse_integer(item.first.as<std::string>());
    if (!channels || !item.second.IsSequence() || item.second.size() != 2) share.expected("[forward, backward]");
    shares[*channels] = {*channels, positive({source, name, item.second[0]}), positive({source, name, item.second[1]})};
  }
  std::vector<DeviceModel::AttentionShare> sorted;
  for (const auto& [channels, share] : shares) sorted.push_back(share);
  return sorted;
}

using Field = std::pair<const char*, double DeviceModel::*>;
constexpr std::array kFields = {Field{"flops_8", &DeviceModel::flops_8},
                                Field{"flops_16", &DeviceModel::flops_16},
                                Field{"flops_32", &DeviceModel::flops_32},
                                Field{"product_share", &DeviceModel::product_share},
                                Field{"memory_bandwidth", &DeviceModel::memory_bandwidth},
                                Field{"memory_share", &DeviceModel::memory_share},
                                Field{"kernel_start", &DeviceModel::kernel_start},
                                Field{"host_launch", &DeviceModel::host_launch},
                                Field{"node_bandwidth", &DeviceModel::node_bandwidth},
                                Field{"network_bandwidth", &DeviceModel::network_bandwidth},
                                Field{"node_latency", &DeviceModel::node_latency},
                                Field{"network_latency", &DeviceModel::network_latency},
                                Field{"host_bandwidth", &DeviceModel::host_bandwidth},
                                Field{"host_memory_bandwidth", &DeviceModel::host_memory_bandwidth},
                                Field{"storage_bandwidth", &DeviceModel::storage_bandwidth}};

/// Parses - {bits: 32, m: 1024, n: 1024, k: 64, flops: 4e10}.
std::vector<DeviceModel::Product> measured_products(const YamlValue& value) {
  constexpr const char* kExpected = "a list of {bits: 32, m: 1024, n: 1024, k: 64, flops: 4e10}";
  if (!value.node.IsSequence()) value.expected(kExpected);
  std::vector<DeviceModel::Product> products;
  for (const auto& item : value.node) {
    if (!item.IsMap() || item.size() != 5) value.expected(kExpected);
    const auto inside = [&](const char* key) {
      if (!item[key].IsDefined()) value.expected(kExpected);
      return YamlValue{value.source, value.key + "." + key, item[key]};
    };
    products.push_back({inside("bits").integer(1), inside("m").integer(1), inside("n").integer(1),
                        inside("k").integer(1), positive(inside("flops"))});
  }
  return products;
}

/// Parses megashard::swiglu: 8e9.
std::map<std::string, double> measured_operators(const YamlValue& value) {
  if (!value.node.IsMap()) value.expected("a map of operators to bytes a second");
  std::map<std::string, double> operators;
  for (const auto& item : value.node) {
    const auto name = item.first.as<std::string>();
    operators[name] = positive({value.source, value.key + "." + name, item.second});
  }
  return operators;
}

constexpr const char* kProgramMemory = "program_memory";
constexpr const char* kProducts = "products";
constexpr const char* kOperators = "operators";
constexpr const char* kOperators16 = "operators_16";
constexpr const char* kAttention16 = "attention_16";

std::vector<std::string> known_keys() {
  std::vector<std::string> keys = {"name",         "memory",  "multiprocessors", "attention",  kAttention16,
                                   "node_devices", kProducts, kOperators,        kOperators16, kProgramMemory};
  for (const auto& [key, field] : kFields) keys.emplace_back(key);
  return keys;
}

}  // namespace

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(own_devices(), ignored)) {
    if (entry.path().extension() == ".yaml") names.push_back(entry.path().stem());
  }
  std::ranges::sort(names);
  return names;
}

DeviceModel read_device_model(const std::string& file_or_name) {
  const std::string source = file_of(file_or_name).string();
  std::stringstream text;
  text << std::ifstream(source).rdbuf();
  const YAML::Node root = load_yaml(text.str(), source);
  if (!root.IsMap()) throw UsageError(source + " holds no keys; docs/plan.md shows what a device needs.");
  const auto keys = known_keys();
  std::map<std::string, YamlValue> values;
  for (const auto& item : root) {
    const auto key = item.first.as<std::string>();
    if (std::find(keys.begin(), keys.end(), key) == keys.end())
      throw UsageError(unknown_key(yaml_place(source, item.first), key, keys));
    values.emplace(key, YamlValue{source, key, item.second});
  }
  const auto value = [&](const std::string& key) -> const YamlValue& {
    const auto found = values.find(key);
    if (found == values.end()) throw UsageError(source + " has no key " + key + "; docs/plan.md says what it is.");
    return found->second;
  };
  DeviceModel model;
  model.name = value("name").text();
  model.memory_bytes = parse_bytes(value("memory").text(), source + ": memory");
  model.multiprocessors = static_cast<int>(value("multiprocessors").integer(1));
  model.node_devices = value("node_devices").integer(1);
  model.attention = attention_shares(source, value("attention"));
  for (const auto& [key, field] : kFields) model.*field = positive(value(key));
  if (values.contains(kProgramMemory))
    model.program_memory = parse_bytes(value(kProgramMemory).text(), source + ": program_memory");
  if (values.contains(kProducts)) model.products = measured_products(value(kProducts));
  if (values.contains(kOperators)) model.operators = measured_operators(value(kOperators));
  if (values.contains(kOperators16)) model.operators_16 = measured_operators(value(kOperators16));
  if (values.contains(kAttention16)) model.attention_16 = attention_shares(source, value(kAttention16));
  return model;
}

void write_device_model(const std::string& path, const DeviceModel& model, const std::string& header) {
  YAML::Emitter out;
  const auto number = [](double value) { return decimal("%.4g", value); };
  out << YAML::Comment(header) << YAML::BeginMap;
  out << YAML::Key << "name" << YAML::Value << model.name;
  out << YAML::Key << "memory" << YAML::Value << model.memory_bytes;
  if (model.program_memory > 0) out << YAML::Key << kProgramMemory << YAML::Value << model.program_memory;
  out << YAML::Key << "multiprocessors" << YAML::Value << model.multiprocessors;
  out << YAML::Key << "node_devices" << YAML::Value << model.node_devices;
  for (const auto& [key, field] : kFields) out << YAML::Key << key << YAML::Value << number(model.*field);
  const auto write_attention = [&](const char* key, const std::vector<DeviceModel::AttentionShare>& shares) {
    if (shares.empty()) return;
    out << YAML::Key << key << YAML::Value << YAML::BeginMap;
    for (const auto& each : shares) {
      out << YAML::Key << each.channels << YAML::Value << YAML::Flow << YAML::BeginSeq << number(each.forward)
          << number(each.backward) << YAML::EndSeq;
    }
    out << YAML::EndMap;
  };
  write_attention("attention", model.attention);
  write_attention(kAttention16, model.attention_16);
  out << YAML::Key << kProducts << YAML::Value << YAML::BeginSeq;
  for (const auto& each : model.products) {
    out << YAML::Flow << YAML::BeginMap << YAML::Key << "bits" << YAML::Value << each.bits << YAML::Key << "m"
        << YAML::Value << each.m << YAML::Key << "n" << YAML::Value << each.n << YAML::Key << "k" << YAML::Value
        << each.k << YAML::Key << "flops" << YAML::Value << number(each.flops) << YAML::EndMap;
  }
  out << YAML::EndSeq;
  for (const auto& [key, operators] : {std::pair(kOperators, &model.operators), {kOperators16, &model.operators_16}}) {
    out << YAML::Key << key << YAML::Value << YAML::BeginMap;
    for (const auto& [name, bandwidth] : *operators) out << YAML::Key << name << YAML::Value << number(bandwidth);
    out << YAML::EndMap;
  }
  out << YAML::EndMap;
  std::ofstream file(path);
  file << out.c_str() << "\n";
  file.close();
  if (!file) throw UsageError("--measure " + path + " cannot be written; give another path.");
}

int64_t parse_bytes(const std::string& text, const std::string& what) {
  constexpr std::array<std::pair<const char*, double>, 9> kUnits = {{{"KiB", 1024.0},
                                                                     {"MiB", 1048576.0},
                                                                     {"GiB", 1073741824.0},
                                                                     {"TiB", 1099511627776.0},
                                                                     {"KB", 1e3},
                                                                     {"MB", 1e6},
                                                                     {"GB", 1e9},
                                                                     {"TB", 1e12},
                                                                     {"", 1}}};
  for (const auto& [unit, bytes] : kUnits) {
    if (!text.ends_with(unit)) continue;
    std::string digits = text.substr(0, text.size() - std::string(unit).size());
    while (digits.ends_with(' ')) digits.pop_back();
    const auto number = parse_number(digits);
    if (number && *number > 0) return static_cast<int64_t>(*number * bytes);
    break;
  }
  throw UsageError(what + " takes bytes, as 139GiB or 80GB, got \"" + text + "\".");
}

}  // namespace megashard
