#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/dcp/tied_keys.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/inspect/checkpoint_source.h"
#include "checkpoint/open_checkpoint.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"

namespace megashard {
namespace {

/// torch_dcp, and torch_dist by torch_dcp's names.
class DcpSource : public CheckpointSource {
 public:
  explicit DcpSource(const std::string& folder) : CheckpointSource(folder), reader_(open_step(path())) {
    for (const auto& entry : reader_->entries()) {
      entry.is_tensor ? add_tensor(entry) : add_value(entry);
    }
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(path()))
      names.push_back(file.path().filename().string());
    std::sort(names.begin(), names.end());
    for (const auto& name : names) add_file(name);
  }

  std::string format() const override { return format_name(reader_->format()); }
  Value value(size_t index) override { return reader_->read_value(*values_[index]); }

  at::Tensor rows(size_t index, int64_t begin, int64_t count) override {
    return reader_->read_rows(*entries_[index], begin, count);
  }

  CheckedBytes verify(const FaultSink& fault) override {
    check_manifest(fault);
    CheckedBytes checked;
    for (const auto& entry : reader_->entries()) {
      if (!entry.is_tensor || entry.value) continue;
      attempt(fault, entry.key, [&] { check_tiling(entry); });
      for (const auto& chunk : entry.chunks) add(checked, check_item(entry, chunk.location, &chunk, fault));
    }
    // Values as they are stored: torch_dist's reader has made others of some of them.
    const auto stored = read_dcp_metadata(path());
    for (const auto& entry : stored.entries) {
      if (!entry.is_tensor) add(checked, check_item(entry, entry.location, nullptr, fault));
    }
    check_overlaps(stored, fault);
    attempt(fault, kCommonFile, [&] {
      const auto common = path() + "/" + kCommonFile;
      if (!path_exists(common)) return;
      const InputFile file(common);
      add(checked, verify_archive(TorchArchive(file, {0, file.size()}), kCommonFile, fault));
    });
    return checked;
  }

 private:
  static void add(CheckedBytes& sum, const CheckedBytes& part) {
    sum.bytes += part.bytes;
    sum.without_checksum += part.without_checksum;
  }

  static void attempt(const FaultSink& fault, const std::string& item, const std::function<void()>& work) {
    try {
      work();
    } catch (const c10::Error& error) {
      fault(std::string(error.what_without_backtrace()) + " (" + item + ")");
    }
  }

  void add_tensor(const DcpEntry& entry) {
    SourceTensor tensor{{entry.key, entry.dtype, entry.sizes}, {}};
    for (const auto& chunk : entry.chunks) {
      tensor.chunks.push_back({chunk.offsets, chunk.sizes, chunk.location.file, chunk.location.range});
    }
    tensors_.push_back(std::move(tensor));
    entries_.push_back(&entry);
  }

  void add_value(const DcpEntry& entry) {
    value_keys_.push_back(entry.key);
    values_.push_back(&entry);
  }

  /// File by file, so that every damaged one is named.
  void check_manifest(const FaultSink& fault) const {
    if (!has_manifest(path())) return;
    attempt(fault, "manifest.json", [&] {
      const auto parts = read_manifest(path()).files.size();
      for (size_t part = 0; part < parts; ++part) {
        const auto damage = step_damage(path(), VerifyDepth::kBytes, part, parts);
        if (!damage.empty()) fault(damage);
      }
    });
  }

  CheckedBytes check_item(const DcpEntry& entry, const DcpLocation& location, const DcpChunk* chunk,
                          const FaultSink& fault) const {
    CheckedBytes checked;
    const auto item = chunk == nullptr ? entry.key : entry.key + " at " + describe_sizes(chunk->offsets);
    attempt(fault, item, [&] {
      TORCH_CHECK(!location.file.empty(), path(), "/.metadata does not say where it is stored");
      const InputFile file(path() + "/" + location.file);
      checked = verify_archive(TorchArchive(file, location.range), item, fault);
      if (chunk == nullptr) {
        read_stored_value(file, location.range);
        return;
      }
      find_stored_chunk(file, entry, *chunk);
    });
    return checked;
  }

  /// No byte belongs to two items, but for keys of one tensor.
  void check_overlaps(const DcpMetadata& stored, const FaultSink& fault) const {
    std::map<std::string, std::vector<std::pair<FileRange, const DcpEntry*>>> items;
    const auto add_item = [&](const DcpEntry& entry, const DcpLocation& location) {
      if (!location.file.empty()) items[location.file].emplace_back(location.range, &entry);
    };
    std::set<std::string> further;
    for (const auto& [key, first] : find_tied_keys(stored.entries)) further.insert(key);
    for (const auto& entry : stored.entries) {
      if (further.count(entry.key) != 0) continue;
      for (const auto& chunk : entry.chunks) add_item(entry, chunk.location);
      if (!entry.is_tensor) add_item(entry, entry.location);
    }
    for (auto& [file, ranges] : items) {
      std::sort(ranges.begin(), ranges.end(),
                [](const auto& a, const auto& b) { return a.first.offset < b.first.offset; });
      for (size_t i = 1; i < ranges.size(); ++i) {
        const auto& [before, owner] = ranges[i - 1];
        if (ranges[i].first.offset - before.offset >= before.length) continue;
        fault(path() + "/" + file + " at byte " + std::to_string(ranges[i].first.offset) + ": " +
              ranges[i].second->key + " and " + owner->key + " lie over each other");
      }
    }
  }

  std::unique_ptr<DcpReader> reader_;
  std::vector<const DcpEntry*> entries_;
  std::vector<const DcpEntry*> values_;
};

}  // namespace

std::unique_ptr<CheckpointSource> open_dcp_source(const std::string& folder) {
  return std::make_unique<DcpSource>(folder);
}

}  // namespace megashard
