#include "checkpoint/dcp/checkpoint_format.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/strict_json.h"

namespace megashard {
namespace {

bool has_legacy_ranks(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().filename().string().starts_with("mp_rank_00")) return true;
  }
  return false;
}

}  // namespace

const char* format_name(CheckpointFormat format) {
  return format == CheckpointFormat::kTorchDist ? "torch_dist" : "torch_dcp";
}

CheckpointFormat format_of_name(const std::string& name) {
  if (name == "torch_dist") return CheckpointFormat::kTorchDist;
  TORCH_CHECK_VALUE(name == "torch_dcp", "\"", name,
                    "\" is no checkpoint format of this program: torch_dcp and torch_dist are");
  return CheckpointFormat::kTorchDcp;
}

std::string parse_sharded_backend(std::string_view text, const std::string& where) {
  const auto json = parse_strict_json(text, where);
  const bool has_name = json.is_object() && json.contains("sharded_backend") && json["sharded_backend"].is_string();
  TORCH_CHECK(has_name, where, " is no JSON object with a \"sharded_backend\": it is damaged");
  const auto version = json.value("sharded_backend_version", nlohmann::json(1));
  TORCH_CHECK_NOT_IMPLEMENTED(version == 1, where, ": version ", version.dump(),
                              " of the format is not known here; 1 is");
  return json["sharded_backend"];
}

CheckpointFormat detect_format(const std::string& folder) {
  TORCH_CHECK_VALUE(is_directory(folder), "there is no checkpoint folder ", folder);
  const auto config = folder + "/" + kFormatFile;
  if (path_exists(config)) {
    const auto backend = parse_sharded_backend(read_small_file(config, kMaxConfigBytes), config);
    TORCH_CHECK_NOT_IMPLEMENTED(backend == "torch_dist", folder, " is of Megatron's format ", backend,
                                ", which is not read here; let Megatron convert it (--ckpt-convert-format torch_dist)");
    return CheckpointFormat::kTorchDist;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !has_legacy_ranks(folder), folder,
      " is of Megatron's legacy format torch (mp_rank_00*), which is not read here; let Megatron convert it "
      "(--ckpt-convert-format torch_dist)");
  const bool has_common = path_exists(folder + "/" + kCommonFile);
  TORCH_CHECK(!has_common, folder,
              " has a common.pt, but no metadata.json, which a torch_dist save writes last: the save was cut short");
  TORCH_CHECK(path_exists(folder + "/" + kDcpMetadataFile), folder,
              " has neither metadata.json nor .metadata: it is no checkpoint, or its save was cut short");
  return CheckpointFormat::kTorchDcp;
}

void expect_format(const std::string& folder, CheckpointFormat expected) {
  const auto found = detect_format(folder);
  TORCH_CHECK_VALUE(found == expected, folder, " is a ", format_name(found), " checkpoint, not ", format_name(expected),
                    "; give --ckpt-format ", format_name(found), ", or --auto-detect-ckpt-format");
}

}  // namespace megashard
