#include "checkpoint/convert/convert.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <filesystem>

#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/steps/step_files.h"

namespace megashard {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr size_t kTensorsBetweenLines = 1000;

std::string gibibytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB",
                static_cast<double>(bytes) / static_cast<double>(kGiB));
  return text;
}

}  // namespace

void TensorCounter::add(int64_t bytes) {
  ++count_;
  bytes_ += bytes;
  const bool due =
      count_ == total_ || count_ % kTensorsBetweenLines == 0 || bytes_ - said_bytes_ >= kGiB;
  if (!due) return;
  said_bytes_ = bytes_;
  progress_(std::to_string(count_) + " of " + std::to_string(total_) + " tensors, " +
            gibibytes(bytes_));
}

std::string checked_step_folder(const std::string& folder, const std::string& flag) {
  TORCH_CHECK(is_directory(folder), "there is no directory ", folder, " for ", flag,
              "; give the folder of a step, such as .../iter_0000100 or .../release");
  if (path_exists(folder + "/" + kDcpMetadataFile)) return folder;
  const auto latest = latest_step(folder);
  TORCH_CHECK(!latest.has_value(), folder, " holds steps, and ", flag, " takes one of them: give ",
              latest->folder, ", the latest");
  return folder;
}

void check_source_bytes(const std::string& folder, const ConvertProgress& progress) {
  if (!has_manifest(folder)) return;
  progress("checking the bytes of " + folder);
  const auto damage = step_damage(folder, VerifyDepth::kBytes);
  TORCH_CHECK(damage.empty(), damage, ": put back what is damaged from a copy, or convert another step");
}

void refuse_existing(const std::string& path, const std::string& flag, ConvertTarget target) {
  std::error_code error;
  const bool empty_folder = target == ConvertTarget::kFolder && is_directory(path) &&
                            std::filesystem::is_empty(path, error);
  TORCH_CHECK(!path_exists(path) || empty_folder, path, " exists already, and ", flag,
              " replaces nothing: remove it, or give another name");
}

}  // namespace megashard
