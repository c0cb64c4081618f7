#include "checkpoint/steps/manifest.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/strict_json.h"
#include "checkpoint/files/work_progress.h"

namespace megashard {

RunHistory new_run() {
  std::random_device bits;
  char id[17];
  std::snprintf(id, sizeof id, "%08x%08x", bits(), bits());
  return {id, {}};
}

RunHistory gone_on_from(RunHistory run, int64_t iteration) {
  auto next = new_run();
  next.before = std::move(run.before);
  next.before.push_back({std::move(run.id), iteration});
  return next;
}

Kinship kinship(const RunHistory& run, const std::string& id, int64_t iteration) {
  if (id == run.id) return Kinship::kOwn;
  const auto is_its = [&](const RunHistory::Part& part) { return part.id == id; };
  const auto is_own = [&](const RunHistory::Part& part) { return part.id == id && iteration <= part.last; };
  const auto& parts = run.before;
  if (std::any_of(parts.begin(), parts.end(), is_own)) return Kinship::kOwn;
  return std::any_of(parts.begin(), parts.end(), is_its) ? Kinship::kLeft : Kinship::kOther;
}

namespace {

using nlohmann::json;

constexpr const char* kManifest = "manifest.json";
constexpr int64_t kFormatVersion = 1;
constexpr int64_t kMaxManifestBytes = 64 << 20;  // enough for about 500,000 files

uint32_t checksum_of(const json& root) {
  const auto text = root.dump();
  return crc32(0, text.data(), static_cast<int64_t>(text.size()));
}

std::string hex(uint32_t crc) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", crc);
  return digits;
}

uint32_t from_hex(const json& text, const std::string& where) {
  uint32_t crc = 0;
  if (text.is_string()) {
    const auto& digits = text.get_ref<const std::string&>();
    const auto* end = digits.data() + digits.size();
    const auto result = std::from_chars(digits.data(), end, crc, 16);
    if (digits.size() == 8 && result.ec == std::errc() && result.ptr == end) return crc;
  }
  TORCH_CHECK(false, where, ": a crc32 is not 8 hexadecimal digits");
}

int64_t count_of(const json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  const bool valid = found != object.end() && found->is_number_unsigned() &&
                     found->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
  TORCH_CHECK(valid, where, ": \"", key, "\" is not there or no count");
  return found->get<int64_t>();
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name != kManifest &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

json json_of(const RunHistory& run) {
  json before = json::array();
  for (const auto& part : run.before) before.push_back({part.id, part.last});
  return {{"id", run.id}, {"before", std::move(before)}};
}

RunHistory run_from(const json& run, const std::string& where) {
  const auto is_part = [](const json& part) {
    return part.is_array() && part.size() == 2 && part[0].is_string() && part[1].is_number_unsigned() &&
           part[1].get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
  };
  const bool valid = run.is_object() && run.contains("id") && run["id"].is_string() && run.contains("before") &&
                     run["before"].is_array() && std::all_of(run["before"].begin(), run["before"].end(), is_part);
  TORCH_CHECK(valid, where, ": \"run\" is not what a run says of itself");
  RunHistory history{run["id"], {}};
  for (const auto& part : run["before"]) history.before.push_back({part[0].get<std::string>(), part[1].get<int64_t>()});
  return history;
}

void check_length(const std::string& path, int64_t expected, bool at_least) {
  TORCH_CHECK(path_exists(path), path, " is missing");
  const int64_t bytes = InputFile(path).size();
  TORCH_CHECK(at_least ? bytes >= expected : bytes == expected, path, " has ", bytes, " bytes instead of ",
              at_least ? "at least " : "", expected, ": it was cut short or replaced");
}

void check_foreign_step(const std::string& folder) {
  TORCH_CHECK(!path_exists(folder + "/" + kCommonFile) || path_exists(folder + "/" + kFormatFile), folder,
              " has no metadata.json, which is written last: its save was cut short");
  std::map<std::string, int64_t> reach;  // end of the last item in each file
  for (const auto& entry : read_dcp_metadata(folder).entries) {
    for (const auto& location : entry.locations()) {
      auto& end = reach[location.file];
      end = std::max(end, location.range.offset + location.range.length);
    }
  }
  for (const auto& [name, bytes] : reach) check_length(folder + "/" + name, bytes, true);
}

}  // namespace

bool has_manifest(const std::string& folder) { return path_exists(folder + "/" + kManifest); }

void write_manifest(const std::string& folder, const Manifest& manifest) {
  json files = json::object();
  for (const auto& file : manifest.files) {
    TORCH_INTERNAL_ASSERT(is_plain_name(file.name), file.name);
    files[file.name] = {{"bytes", file.bytes}, {"crc32", hex(file.crc32)}};
  }
  json root{{"format_version", kFormatVersion}, {"iteration", manifest.iteration}, {"files", std::move(files)}};
  if (!manifest.run.id.empty()) root["run"] = json_of(manifest.run);
  root["crc32"] = hex(checksum_of(root));
  write_file_atomically(folder + "/" + kManifest, root.dump(1) + "\n");
}

Manifest read_manifest(const std::string& folder) {
  const auto path = folder + "/" + kManifest;
  return parse_manifest(read_small_file(path, kMaxManifestBytes), path);
}

Manifest parse_manifest(std::string_view text, const std::string& where) {
  auto root = parse_strict_json(text, where);
  TORCH_CHECK(root.is_object() && root.contains("crc32") && root.contains("files"), where,
              " is damaged, or no manifest of a step");
  const auto version = count_of(root, "format_version", where);
  TORCH_CHECK_NOT_IMPLEMENTED(version == kFormatVersion, where, " has format_version ", version,
                              "; this program reads ", kFormatVersion,
                              ": load it with the newer program that wrote it");
  const auto expected = from_hex(root["crc32"], where);
  root.erase("crc32");
  TORCH_CHECK(checksum_of(root) == expected, where,
              " does not have its own checksum: its bytes have changed since it was written");
  Manifest manifest;
  manifest.iteration = count_of(root, "iteration", where);
  TORCH_CHECK(root["files"].is_object(), where, ": \"files\" is not an object");
  for (const auto& [name, file] : root["files"].items()) {
    TORCH_CHECK(is_plain_name(name), where, " names the file ", json(name).dump(), ", which is not one of its folder");
    TORCH_CHECK(file.is_object() && file.contains("crc32"), where, ": ", name, " has no crc32");
    manifest.files.push_back({name, count_of(file, "bytes", where), from_hex(file["crc32"], where)});
  }
  if (root.contains("run")) manifest.run = run_from(root["run"], where);
  return manifest;
}

RunHistory run_of_step(const std::string& folder) {
  return has_manifest(folder) ? read_manifest(folder).run : RunHistory{};
}

std::string checksum_damage(const std::string& folder, const WrittenFile& file, uint32_t found) {
  if (found == file.crc32) return "";
  return folder + "/" + file.name + " has the checksum " + hex(found) + " instead of " + hex(file.crc32) +
         ": its bytes have changed since it was written";
}

std::string step_damage(const std::string& folder, VerifyDepth depth, size_t part, size_t parts) {
  try {
    TORCH_CHECK_VALUE(is_directory(folder), "there is no checkpoint folder ", folder);
    if (!has_manifest(folder)) {
      if (part == 0) check_foreign_step(folder);
      return "";
    }
    const auto files = read_manifest(folder).files;
    int64_t bytes = 0;
    for (size_t i = part; i < files.size() && depth == VerifyDepth::kBytes; i += parts) bytes += files[i].bytes;
    LongWork work("check", bytes);
    for (size_t i = part; i < files.size(); i += parts) {
      const auto path = folder + "/" + files[i].name;
      check_length(path, files[i].bytes, false);
      if (depth == VerifyDepth::kSizes) continue;
      const InputFile file(path);
      const auto damage = checksum_damage(folder, files[i], crc32_of(file, 0, file.size(), &work));
      if (!damage.empty()) return damage;
    }
  } catch (const UnreadableError&) {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

void verify_step(const std::string& folder, VerifyDepth depth) {
  const auto damage = step_damage(folder, depth);
  TORCH_CHECK(damage.empty(), damage, ": put back what is damaged from a copy, or load another step (--ckpt-step)");
}

}  // namespace megashard
