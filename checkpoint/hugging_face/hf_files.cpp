#include "checkpoint/hugging_face/hf_files.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/files/strict_json.h"

namespace megashard {
namespace {

constexpr const char* kWeightsEnd = ".safetensors";
constexpr const char* kIndexEnd = ".safetensors.index.json";

std::string file_name(const std::string& stem, size_t index, size_t count) {
  if (count == 1) return stem + kWeightsEnd;
  char text[64];
  std::snprintf(text, sizeof text, "-%05zu-of-%05zu", index + 1, count);
  return stem + text + kWeightsEnd;
}

/// Returns false if the file does not exist.
bool remove_file(const std::string& path) {
  const bool removed = ::unlink(path.c_str()) == 0;
  TORCH_CHECK(removed || errno == ENOENT, "cannot remove ", path, ": ", std::strerror(errno));
  return removed;
}

}  // namespace

HfFilePlan plan_hf_files(const std::vector<TensorInfo>& tensors, const HfSaveOptions& options) {
  const auto max_bytes = options.max_shard_bytes;
  TORCH_CHECK_VALUE(max_bytes > 0, "the largest size of a safetensors file must be positive, got ", max_bytes);
  HfFilePlan plan;
  plan.files.emplace_back();
  int64_t file_bytes = 0;
  for (const auto& info : tensors) {
    const auto bytes = tensor_bytes(info);
    if (!plan.files.back().tensors.empty() && bytes > max_bytes - file_bytes) {
      plan.files.emplace_back();
      file_bytes = 0;
    }
    plan.files.back().tensors.push_back(info);
    file_bytes += bytes;
  }
  for (size_t i = 0; i < plan.files.size(); ++i) plan.files[i].name = file_name(options.stem, i, plan.files.size());
  return plan;
}

HfFolderWriter::HfFolderWriter(std::string directory, HfFilePlan plan, HfSaveOptions options)
    : directory_(std::move(directory)),
      plan_(std::move(plan)),
      options_(std::move(options)),
      folder_(directory_ + "/" + options_.stem) {}

std::string HfFolderWriter::index_name() const { return options_.stem + kIndexEnd; }

void HfFolderWriter::write_index() const {
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  int64_t total_bytes = 0;
  for (const auto& file : plan_.files) {
    for (const auto& info : file.tensors) {
      weight_map[info.name] = file.name;
      total_bytes += tensor_bytes(info);
    }
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
  write_file_atomically(path(index_name()), index.dump(2) + "\n");
}

void HfFolderWriter::remove_earlier_weights() {
  for (const auto& first : {index_name(), options_.stem + kWeightsEnd})
    has_removed_ = remove_file(directory_ + "/" + first) || has_removed_;
  if (has_removed_) sync_directory(directory_);  // before new files become visible
  for (const auto& name : names_in(directory_)) {
    if (name.starts_with(options_.stem + "-") && name.ends_with(kWeightsEnd)) remove_file(directory_ + "/" + name);
  }
}

void HfFolderWriter::publish() {
  if (options_.beside) options_.beside(folder_.hidden());
  const bool is_single = plan_.files.size() == 1;
  if (!is_single) write_index();
  sync_directory(folder_.hidden());
  const auto last = is_single ? plan_.files[0].name : index_name();
  auto names = names_in(folder_.hidden());
  std::erase(names, last);
  remove_earlier_weights();
  for (const auto& name : names) rename_durably(path(name), directory_ + "/" + name);
  rename_durably(path(last), directory_ + "/" + last);
  remove_directory(folder_.hidden());
}

bool hf_save_was_cut_short(const std::string& directory) {
  return is_unfinished(directory + "/" + HfSaveOptions().stem);
}

namespace {

namespace fs = std::filesystem;

std::string config_path(const std::string& directory) { return directory + "/config.json"; }

/// True for all files except weights.
bool is_asset(const fs::path& path) {
  const auto name = path.filename().string();
  const auto extension = path.extension().string();
  const bool weights = extension == ".safetensors" || extension == ".bin" || extension == ".pt" ||
                       extension == ".pth" || extension == ".gguf" || name.ends_with(".index.json");
  return !name.starts_with(".") && !weights;
}

std::optional<nlohmann::ordered_json> read_object(const std::string& path) {
  if (!path_exists(path)) return std::nullopt;
  auto object = parse_ordered_json(read_small_file(path, kMaxConfigBytes), path);
  TORCH_CHECK(object.is_object(), path, " is not a JSON object");
  return object;
}

/// True if the weights are in MXFP4, which is read as bf16 (dequantise_mxfp4).
bool is_mxfp4(const nlohmann::ordered_json& config) {
  const auto found = config.find("quantization_config");
  return found != config.end() && found->is_object() && found->value("quant_method", "") == "mxfp4";
}

}  // namespace

void copy_hf_assets(const std::string& from, const std::string& to) {
  for (const auto& entry : fs::directory_iterator(from)) {
    if (!entry.is_regular_file() || !is_asset(entry.path())) continue;
    const MappedFile source(entry.path().string());
    OutputFile copy(to + "/" + entry.path().filename().string(), source.size());
    copy.write(source.data(), source.size());
    copy.sync_and_close();
  }
  const auto config = read_object(config_path(from));
  if (config && is_mxfp4(*config)) write_hf_config(to, *read_hf_config(from));
}

std::optional<nlohmann::ordered_json> read_hf_config(const std::string& directory) {
  if (directory.empty()) return std::nullopt;
  auto config = read_object(config_path(directory));
  if (config && is_mxfp4(*config)) config->erase("quantization_config");
  return config;
}

std::optional<nlohmann::ordered_json> read_generation_config(const std::string& directory) {
  if (directory.empty()) return std::nullopt;
  return read_object(directory + "/generation_config.json");
}

nlohmann::ordered_json need_hf_config(const std::string& directory) {
  auto config = read_hf_config(directory);
  TORCH_CHECK_VALUE(config, "cannot read ", config_path(directory),
                    ": --hf-model must be a Hugging Face model directory with a config.json in it");
  return *std::move(config);
}

void write_hf_config(const std::string& directory, const nlohmann::ordered_json& config) {
  write_file_atomically(config_path(directory), config.dump(2) + "\n");
}

}  // namespace megashard
