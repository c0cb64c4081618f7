// Finds MindSpeed-MM's sections in the files of flags, and reads their keys.
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <utility>

#include "framework/arguments/argument_value.h"
#include "framework/arguments/yaml_value.h"
#include "launch/mindspeed/mindspeed_keys.h"

namespace megashard {
namespace {

constexpr const char* kNativeSections[] = {"training", "features", "model", "data"};

/// Reads a section of a file and its inner sections.
class SectionReader {
 public:
  /// `skip`: prefix of the keys in a file that is a section itself ("data.").
  SectionReader(const std::string& file, std::span<const MindSpeedSection> sections, const std::string& skip,
                MindSpeedRun& run, Arguments& arguments, Mistakes& mistakes, KeyLog* log)
      : file_(file),
        sections_(sections),
        skip_(skip),
        run_(run),
        arguments_(arguments),
        mistakes_(mistakes),
        log_(log) {}

  /// Skips a section.
  void leave(const std::string& path) { left_.insert(path); }

  void read(const std::string& path, const YAML::Node& node) {
    if (!node.IsDefined() || node.IsNull()) return;
    const auto* section = find(path);
    if (!node.IsMap()) {
      const auto each = value(path, node);
      mistakes_.attempt([&] { take_key(log_, each, [&] { each.expected("a map"); }); });
      return;
    }
    for (const auto& item : node) {
      const auto below = path + "." + item.first.Scalar();
      if (left_.contains(below)) {
        leave_key(log_, value(below, item.second), "it is not enabled");
      } else if (find(below) != nullptr && (item.second.IsMap() || !has_key(*section, item.first.Scalar()))) {
        read(below, item.second);
      } else {
        mistakes_.attempt([&] { read_key(*section, item.first, below, item.second); });
      }
    }
  }

 private:
  const MindSpeedSection* find(const std::string& path) const {
    const auto found =
        std::find_if(sections_.begin(), sections_.end(), [&](const auto& section) { return path == section.path; });
    return found == sections_.end() ? nullptr : &*found;
  }

  static bool has_key(const MindSpeedSection& section, const std::string& name) {
    return std::ranges::find(section.keys, name, &MindSpeedKey::name) != section.keys.end();
  }

  YamlValue value(const std::string& path, const YAML::Node& node) const {
    return {file_, path.starts_with(skip_) ? path.substr(skip_.size()) : path, node};
  }

  void read_key(const MindSpeedSection& section, const YAML::Node& written, const std::string& path,
                const YAML::Node& node) {
    const auto name = written.Scalar();
    const auto each = value(path, node);
    const auto keys = section.keys;
    const auto found = std::find_if(keys.begin(), keys.end(), [&](const auto& key) { return name == key.name; });
    if (found == keys.end()) return unknown(section, written, each);
    if (each.is_null() && !found->null_counts) return leave_key(log_, each, "it has no value");
    if (found->take != nullptr) return take_key(log_, each, arguments_, [&] { found->take(each, run_, arguments_); });
    if (*found->why == '\0') return leave(each);
    if (asks_for_nothing(*found, each)) return leave_key(log_, each, "it asks for nothing");
    take_key(log_, each, [&] { refuse(*found, each); });
  }

  void leave(const YamlValue& each) {
    run_.unused.push_back(each.key);
    leave_key(log_, each, "nothing here reads it");
  }

  void unknown(const MindSpeedSection& section, const YAML::Node& written, const YamlValue& each) {
    std::vector<std::string> known;
    for (const auto& key : section.keys) known.emplace_back(key.name);
    for (const auto& other : sections_) {
      const std::string path = other.path, outer = std::string(section.path) + ".";
      if (path.starts_with(outer)) known.push_back(path.substr(outer.size()));
    }
    const auto message = unknown_key(yaml_place(file_, written), each.key, known);
    if (section.unknown != UnknownKey::kError && !message.ends_with('?')) return leave(each);
    take_key(log_, each, [&] { throw UsageError(message); });
  }

  static bool asks_for_nothing(const MindSpeedKey& key, const YamlValue& each) {
    const bool empty = !each.node.IsScalar() && each.node.size() == 0;
    const auto harmless = comma_words({key.only});
    auto text = each.node.IsScalar() ? each.text() : "";
    std::transform(text.begin(), text.end(), text.begin(), [](char c) { return std::tolower(c); });
    const bool same = std::any_of(harmless.begin(), harmless.end(), [&](std::string word) {
      std::transform(word.begin(), word.end(), word.begin(), [](char c) { return std::tolower(c); });
      return word == text;
    });
    return empty || same;
  }

  static void refuse(const MindSpeedKey& key, const YamlValue& each) {
    const auto harmless = comma_words({key.only});
    each.fail((each.node.IsScalar() ? "is " + each.text() : "is given") + ", but " + key.why +
              (harmless.empty() ? "; remove it" : "; write " + harmless.front()));
  }

  const std::string& file_;
  std::span<const MindSpeedSection> sections_;
  std::string skip_;
  MindSpeedRun& run_;
  Arguments& arguments_;
  Mistakes& mistakes_;
  KeyLog* log_;
  std::set<std::string> left_;
};

/// A section and its file.
struct Section {
  std::string file;
  YAML::Node node{YAML::NodeType::Undefined};
  bool is_file = false;  // the file is the section
};

/// `--mm-data FILE` is a section in JSON, or a YAML file that contains the section by name.
Section section_of(const std::string& path, const std::string& flag, const char* name) {
  Section section{path, load_yaml(read_configuration(path, flag), path), true};
  if (!section.node.IsMap()) throw UsageError(flag + " " + path + ": the file must hold a map of keys.");
  if (const YAML::Node inner = section.node[name]; path.ends_with(".yaml") && inner.IsDefined())
    return {path, inner, false};
  return section;
}

YAML::Node root_of(const std::string& path) {
  try {
    return load_yaml(read_configuration(path, ""), path);
  } catch (const UsageError&) {
    return YAML::Node(YAML::NodeType::Undefined);  // the file's reader reports the error
  }
}

bool is_native(const YAML::Node& root) {
  return root.IsDefined() && root.IsMap() && !root["gpt_args"].IsDefined() &&
         std::any_of(std::begin(kNativeSections), std::end(kNativeSections), [&](const char* name) {
           const YAML::Node section = root[name];
           return section.IsDefined() && section.IsMap();
         });
}

std::string known_models() {
  std::vector<std::string> ids;
  for (const auto& model : mindspeed_models()) ids.emplace_back(model.id);
  return c10::Join(", ", ids);
}

/// A key of a map; undefined if absent.
YAML::Node inside(const YAML::Node& map, const char* key) {
  return map.IsDefined() && map.IsMap() ? map[key] : YAML::Node(YAML::NodeType::Undefined);
}

/// Refuses a section about an unsupported model, whose other keys are then meaningless.
void check_model_id(const Section& model) {
  const YAML::Node own = model.node["model_id"];
  const char* part = model.node["predictor"].IsDefined() ? "predictor" : "text_decoder";
  const YAML::Node id = own.IsDefined() ? own : inside(inside(model.node, part), "model_id");
  const bool named = id.IsDefined() && id.IsScalar();
  if (named && find_mindspeed_model(id.Scalar()) != nullptr) return;
  const bool from_hf = model.node["init_from_hf_path"].IsDefined() || model.node["model_name_or_path"].IsDefined();
  if (!named && from_hf) return;  // config.json names it
  throw UsageError(yaml_place(model.file, named ? id : model.node) + "model" +
                   (named ? "_id " + id.Scalar() + " is" : ": the section describes") +
                   " no model that this program has; it has " + known_models() + ", and models of text by --hf-model.");
}

bool is_on(const YAML::Node& node) {
  bool on = false;
  return node.IsDefined() && YAML::convert<bool>::decode(node, on) && on;
}

/// Sets the native route's defaults.
void set_native_defaults(Arguments& arguments) {
  const auto set = [&](const char* name, auto& field, auto value) {
    if (!arguments.is_given(name)) field = value;
  };
  set("lr", arguments.lr, 5e-5);
  set("seed", arguments.seed, 42);
  set("weight_decay", arguments.weight_decay, 0.0);
  set("lr_decay_style", arguments.lr_decay_style, LrDecayStyle::kConstant);
  set("micro_batch_size", arguments.micro_batch_size, 1);
  set("train_iters", arguments.train_iters, 10000);
  set("log_interval", arguments.log_interval, 1);
  set("ckpt_format", arguments.ckpt_format, CheckpointFormat::kTorchDcp);
  set("use_torch_fsdp2", arguments.use_torch_fsdp2, true);
  set("muon_momentum", arguments.muon_momentum, 0.95);
  set("muon_extra_scale_factor", arguments.muon_extra_scale_factor, 0.2);
}

/// Without these keys a plan changes no layer.
void check_float8_plan(const YAML::Node& plan, const std::string& file, Mistakes& mistakes) {
  const YAML::Node recipe = inside(plan, "recipe_name");
  if (!recipe.IsDefined() || recipe.IsNull()) return;
  for (const char* key : {"apply_modules", "quant_converters"}) {
    const YAML::Node list = inside(plan, key);
    mistakes.require(list.IsDefined() && list.size() > 0, yaml_place(file, recipe) +
                                                              "training.quantization_plan.recipe_name needs " + key +
                                                              ", a list; give it, or remove the plan.");
  }
}

void read_native(const std::string& file, const YAML::Node& root, MindSpeedRun& run, Arguments& arguments,
                 Mistakes& mistakes, KeyLog* log) {
  run.is_native = true;
  run.recomputes = run.offloads = run.recompute_reentrant = false;
  SectionReader reader(file, mindspeed_training_sections(), "", run, arguments, mistakes, log);
  if (!is_on(inside(inside(root["training"], "lora"), "enable"))) reader.leave("training.lora");
  reader.read("training", root["training"]);
  reader.read("features", root["features"]);
  check_float8_plan(inside(root["training"], "quantization_plan"), file, mistakes);
  if (const YAML::Node tools = root["tools"]; tools.IsDefined()) {
    run.unused.emplace_back("tools");
    leave_key(log, {file, "tools", tools}, "nothing here reads it");
  }
  set_native_defaults(arguments);
  if (!arguments.save) arguments.save_interval.reset();
  if (arguments.save && !arguments.save_interval) arguments.save_interval = 1;
}

void read_data(const Section& section, MindSpeedRun& run, Arguments& arguments, Mistakes& found, KeyLog* log) {
  Mistakes unheeded;  // the remedy of some is --data-path
  Mistakes& mistakes = has_own_data(arguments) ? unheeded : found;
  run.prepares_data = true;
  run.data.emplace();
  run.data->place = section.file + ": " + (section.is_file ? "" : "data.") + "dataset_param";
  run.data->strip_text = run.is_native;
  if (run.is_native) run.data->cutoff_length = 1024;
  SectionReader(section.file, mindspeed_data_sections(), section.is_file ? "data." : "", run, arguments, mistakes, log)
      .read("data", section.node);
  const auto& data = *run.data;
  const bool tiles = data.has_tiles;
  mistakes.require(!data.inputs.empty(), data.place + ".basic_parameters." + (tiles ? "data_path" : "dataset") +
                                             " is missing; name the file.");
  mistakes.require(!data.model.empty(),
                   data.place +
                       (tiles ? ".tokenizer_config.from_pretrained" : ".preprocess_parameters.model_name_or_path") +
                       " is missing; name the model's folder.");
  mistakes.require(!data.turn_template.empty(), data.place + ".basic_parameters.template is missing; give one of " +
                                                    c10::Join(", ", turn_templates()) + ".");
}

/// The data section beside a diffusion model.
void read_features(const Section& section, MindSpeedRun& run, Arguments& arguments, Mistakes& found, KeyLog* log) {
  Mistakes unheeded;  // the remedy of some is --data-path
  Mistakes& mistakes = has_own_data(arguments) ? unheeded : found;
  MindSpeedDiffusion& diffusion = *run.diffusion;
  diffusion.place = section.file + ": " + (section.is_file ? "" : "data.") + "dataset_param";
  const auto sections = diffusion.is_ltx2 ? mindspeed_ltx2_data_sections() : mindspeed_feature_sections();
  SectionReader(section.file, sections, section.is_file ? "data." : "", run, arguments, mistakes, log)
      .read("data", section.node);
  const char* missing = diffusion.is_ltx2 ? "dataset_dir is missing; name the folder .precomputed."
                                          : "data_path is missing; name data.jsonl, or a data.txt.";
  mistakes.require(!diffusion.data_path.empty(), diffusion.place + ".basic_parameters." + missing);
}

}  // namespace

bool has_own_data(const Arguments& arguments) {
  return arguments.is_given("data_path") || arguments.is_given("train_data_path") || arguments.mock_data;
}

bool is_native_configuration(const std::string& path) { return is_native(root_of(path)); }

std::optional<MindSpeedRun> read_mindspeed(const std::optional<std::string>& config, Arguments& arguments,
                                           Mistakes& mistakes, KeyLog* log) {
  Section data, model;
  MindSpeedRun run;
  run.model_by_flag = arguments.is_given("hf_model");
  run.length_by_flag = arguments.is_given("train_iters");
  for (const auto& file : {arguments.fsdp2_config_path, config}) {  // the later one takes precedence
    if (!file) continue;
    const YAML::Node root = root_of(*file);
    const bool beside_flags = root.IsDefined() && root.IsMap() && root["gpt_args"].IsDefined();
    if (!is_native(root) && !beside_flags) continue;
    if (is_native(root)) {
      read_native(*file, root, run, arguments, mistakes, log);
      if (!arguments.fsdp2_config_path) arguments.fsdp2_config_path = *file;
    }
    if (const YAML::Node found = root["data"]; found.IsDefined() && found.IsMap()) data = {*file, found, false};
    if (const YAML::Node found = root["model"]; found.IsDefined() && found.IsMap()) model = {*file, found, false};
  }
  if (arguments.mm_data) mistakes.attempt([&] { data = section_of(*arguments.mm_data, "--mm-data", "data"); });
  if (arguments.mm_model) mistakes.attempt([&] { model = section_of(*arguments.mm_model, "--mm-model", "model"); });
  if (arguments.mm_tool) run.unused.emplace_back("--mm-tool");
  if (model.node.IsDefined()) {
    mistakes.attempt_or_throw([&] { check_model_id(model); });  // all other keys concern that model
    const YAML::Node id = model.node["model_id"];
    const bool is_ltx2 = id.IsDefined() && id.IsScalar() && id.Scalar() == "ltx2";
    if (model.node["predictor"].IsDefined() || is_ltx2) run.diffusion.emplace().is_ltx2 = is_ltx2;
    const auto sections = is_ltx2         ? mindspeed_ltx2_sections()
                          : run.diffusion ? mindspeed_diffusion_sections()
                                          : mindspeed_model_sections();
    SectionReader(model.file, sections, model.is_file ? "model." : "", run, arguments, mistakes, log)
        .read("model", model.node);
  }
  if (data.node.IsDefined()) (run.diffusion ? read_features : read_data)(data, run, arguments, mistakes, log);
  if (run.diffusion && !arguments.hf_model) find_diffusion_model(*run.diffusion, arguments);
  if (run.data && !run.data->model.empty() && !arguments.hf_model)
    arguments.hf_model = run.data->model;  // MindSpeed-MM converts these weights
  const bool any = run.is_native || data.node.IsDefined() || model.node.IsDefined() || arguments.mm_tool;
  return any ? std::optional(std::move(run)) : std::nullopt;
}

}  // namespace megashard
