#include "checkpoint/hugging_face/hf_assets.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/strict_json.h"

namespace megashard {
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

}  // namespace

void copy_hf_assets(const std::string& from, const std::string& to) {
  for (const auto& entry : fs::directory_iterator(from)) {
    if (!entry.is_regular_file() || !is_asset(entry.path())) continue;
    const MappedFile source(entry.path().string());
    OutputFile copy(to + "/" + entry.path().filename().string(), source.size());
    copy.write(source.data(), source.size());
    copy.sync_and_close();
  }
}

std::optional<nlohmann::ordered_json> read_hf_config(const std::string& directory) {
  if (directory.empty()) return std::nullopt;
  return read_object(config_path(directory));
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
