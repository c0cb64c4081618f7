#include "checkpoint/inspect/checkpoint_source.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/unreadable_error.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"

namespace megashard {
namespace {

constexpr int64_t kReadAtOnce = 8 << 20;

std::optional<int64_t> iteration_of(const std::string& path) {
  const auto step = step_named(std::filesystem::path(path).filename().string(), path);
  return step && !step->is_release ? std::optional(step->iteration) : std::nullopt;
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

bool begins_with(const std::string& path, std::string_view magic) {
  const InputFile file(path);
  std::string begin(magic.size(), '\0');
  if (file.size() < static_cast<int64_t>(magic.size())) return false;
  file.read_at(begin.data(), static_cast<int64_t>(begin.size()), 0);
  return begin == magic;
}

}  // namespace

CheckpointSource::CheckpointSource(std::string path)
    : path_(without_slash(std::move(path))), iteration_(iteration_of(path_)) {}

void CheckpointSource::add_file(const std::string& name) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(name.empty() ? path_ : path_ + "/" + name, error);
  const auto shown = name.empty() ? std::filesystem::path(path_).filename().string() : name;
  files_.emplace_back(shown, error ? int64_t{-1} : static_cast<int64_t>(bytes));
}

std::unique_ptr<CheckpointSource> open_checkpoint(const std::string& path, std::optional<int64_t> ckpt_step,
                                                  const std::function<void(const std::string& line)>& notice) {
  TORCH_CHECK(path_exists(path), "there is no file or folder ", path);
  if (!is_directory(path)) {
    TORCH_CHECK(!ckpt_step, "--ckpt-step goes with the directory of a training, and ", path, " is a file");
    if (begins_with(path, "PK")) return open_torch_file_source(path);
    return open_safetensors_source(path);
  }
  if (!ckpt_step) {
    const bool step = path_exists(path + "/" + kDcpMetadataFile) || path_exists(path + "/" + kFormatFile);
    if (step) return open_dcp_source(path);
    const bool hugging_face =
        path_exists(path + "/model.safetensors") || path_exists(path + "/model.safetensors.index.json");
    if (hugging_face) return open_safetensors_source(path);
  }
  const auto step = ckpt_step ? std::optional(step_at(path, *ckpt_step))
                              : find_step(path, nullptr, {.depth = VerifyDepth::kSizes, .notice = notice});
  TORCH_CHECK(step.has_value(), path,
              " is no checkpoint: it has no .metadata, no model.safetensors and no latest_checkpointed_iteration.txt");
  return open_dcp_source(step->folder);
}

CheckedBytes verify_archive(const TorchArchive& archive, const std::string& item, const FaultSink& fault) {
  CheckedBytes checked;
  std::vector<char> buffer;
  for (const auto& [name, entry] : archive.entries()) {
    try {
      const auto range = archive.locate(name);
      uint32_t sum = 0;
      for (int64_t done = 0; done < range.length;) {
        const auto bytes = std::min(kReadAtOnce, range.length - done);
        buffer.resize(static_cast<size_t>(bytes));
        archive.file().read_at(buffer.data(), bytes, range.offset + done);
        sum = crc32(sum, buffer.data(), bytes);
        done += bytes;
      }
      checked.bytes += range.length;
      // torch.serialization.set_crc32_options(False) leaves the sum out.
      if (entry.crc32 == 0 && sum != 0) {
        checked.without_checksum += range.length;
      } else if (entry.crc32 != sum) {
        fault(archive.where() + ": entry " + name + " of " + item + " is damaged (its CRC-32 is " +
              std::to_string(sum) + ", not " + std::to_string(entry.crc32) + ")");
      }
    } catch (const UnreadableError&) {
      throw;
    } catch (const c10::Error& error) {
      fault(std::string(error.what_without_backtrace()) + " (" + item + ")");
    }
  }
  return checked;
}

}  // namespace megashard
