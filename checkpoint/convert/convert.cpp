#include "checkpoint/convert/convert.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <filesystem>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/folder_content.h"
#include "checkpoint/steps/manifest.h"

namespace megashard {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20, kGiB = kMiB << 10;
constexpr const char* kDataFileEnd = ".distcp";
constexpr const char* kRemedy = ": put back what is damaged from a copy, or convert another step";

std::string bytes_text(int64_t bytes) {
  const bool large = bytes >= kGiB;
  char text[32];
  std::snprintf(text, sizeof text, large ? "%.2f GiB" : "%.2f MiB", static_cast<double>(bytes) / (large ? kGiB : kMiB));
  return text;
}

/// Verifies all files except the data files.
void check_descriptions(const std::string& folder) {
  if (!has_manifest(folder)) return;
  for (const auto& file : read_manifest(folder).files) {
    if (file.name.ends_with(kDataFileEnd)) continue;
    const InputFile stored(folder + "/" + file.name);
    const auto damage = checksum_damage(folder, file, crc32_of(stored, 0, stored.size()));
    TORCH_CHECK(damage.empty(), damage, kRemedy);
  }
}

}  // namespace

void TensorCounter::add(int64_t bytes) {
  ++count_;
  bytes_ += bytes;
  work_.add(bytes);
  if (count_ == total_) progress_(std::to_string(count_) + " tensors, " + bytes_text(bytes_));
}

int64_t total_bytes(const std::vector<TensorInfo>& tensors) {
  int64_t bytes = 0;
  for (const auto& info : tensors) bytes += tensor_bytes(info);
  return bytes;
}

void check_step_folder(const std::string& folder, const std::string& flag) {
  const bool is_file = path_exists(folder) && !is_directory(folder);
  TORCH_CHECK_VALUE(
      !is_file, folder, " is a file, and ", flag,
      " takes a step's folder, such as .../iter_0000100 or .../release; torch_to_dcp makes a step of a file of "
      "torch.save");
  TORCH_CHECK_VALUE(is_directory(folder), "there is no directory ", folder, " for ", flag,
                    "; give the folder of a step, such as .../iter_0000100 or .../release");
  if (path_exists(folder + "/" + kDcpMetadataFile)) {
    check_descriptions(folder);
    return;
  }
  const auto latest = latest_step(folder);
  const auto content = content_of(folder);
  TORCH_CHECK_VALUE(content.kind != FolderContent::Kind::kRun, folder, " holds steps, and ", flag,
                    " takes one of them: give ", latest ? latest->folder : folder + "/" + content.name, ", the latest");
  TORCH_CHECK_VALUE(content.kind != FolderContent::Kind::kWeights || !content.name.ends_with(".safetensors"), folder,
                    " holds Hugging Face weights; hf_to_dcp and hf_to_torch_dist read them, and ", flag,
                    " takes a step's folder");
}

void check_source_bytes(const std::string& folder, const ConvertProgress& progress) {
  if (!has_manifest(folder)) return;
  progress("checking the bytes of " + folder);
  const auto damage = step_damage(folder, VerifyDepth::kBytes);
  TORCH_CHECK(damage.empty(), damage, kRemedy);
}

void refuse_existing(const std::string& path, const std::string& flag) {
  std::error_code error;
  const bool empty_folder = is_directory(path) && std::filesystem::is_empty(path, error);
  TORCH_CHECK_VALUE(!path_exists(path) || empty_folder, path, " exists already, and ", flag,
                    " replaces nothing: give another name, or --overwrite");
}

}  // namespace megashard
