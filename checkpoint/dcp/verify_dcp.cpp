#include "checkpoint/dcp/verify_dcp.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/dcp/tied_keys.h"
#include "checkpoint/files/file_io.h"

namespace megashard {
namespace {

class Verification {
 public:
  Verification(const std::string& folder, const FaultSink& fault) : folder_(folder), fault_(fault) {}

  void check_tensor(const DcpEntry& entry, const DcpTensor& tensor) {
    attempt(entry.key, [&] { check_tiling(entry.key, tensor); });
    for (const auto& chunk : tensor.chunks) {
      check_item(entry.key + " at " + describe_sizes(chunk.offsets), chunk.location,
                 [&](const InputFile& file) { find_stored_chunk(file, entry.key, tensor, chunk); });
    }
  }

  void check_bytes(const DcpEntry& entry, const DcpBytes& bytes) {
    check_item(entry.key, bytes.location,
               [&](const InputFile& file) { read_stored_value(file, bytes.location.range); });
  }

  void check_common() {
    const auto common = folder_ + "/" + kCommonFile;
    if (!path_exists(common)) return;
    attempt(kCommonFile, [&] {
      const InputFile file(common);
      checked_ += verify_archive(TorchArchive(file, {0, file.size()}), kCommonFile, fault_);
    });
  }

  void check_overlaps(const DcpMetadata& stored) const {
    std::map<std::string, std::vector<std::pair<FileRange, const DcpEntry*>>> items;
    std::set<std::string> further;
    for (const auto& [key, first] : find_tied_keys(stored.entries)) further.insert(key);
    for (const auto& entry : stored.entries) {
      if (further.count(entry.key) != 0) continue;
      for (const auto& location : entry.locations()) items[location.file].emplace_back(location.range, &entry);
    }
    for (auto& [file, ranges] : items) {
      std::sort(ranges.begin(), ranges.end(),
                [](const auto& a, const auto& b) { return a.first.offset < b.first.offset; });
      for (size_t i = 1; i < ranges.size(); ++i) {
        const auto& [before, owner] = ranges[i - 1];
        if (ranges[i].first.offset - before.offset >= before.length) continue;
        fault_(folder_ + "/" + file + " at byte " + std::to_string(ranges[i].first.offset) + ": " +
               ranges[i].second->key + " and " + owner->key + " lie over each other");
      }
    }
  }

  const CheckedBytes& checked() const { return checked_; }

 private:
  void attempt(const std::string& item, const std::function<void()>& work) const {
    try {
      work();
    } catch (const c10::Error& error) {
      fault_(std::string(error.what_without_backtrace()) + " (" + item + ")");
    }
  }

  void check_item(const std::string& item, const DcpLocation& location,
                  const std::function<void(const InputFile& file)>& check_content) {
    attempt(item, [&] {
      TORCH_CHECK(!location.file.empty(), folder_, "/.metadata does not say where it is stored");
      const InputFile file(folder_ + "/" + location.file);
      checked_ += verify_archive(TorchArchive(file, location.range), item, fault_);
      check_content(file);
    });
  }

  const std::string& folder_;
  const FaultSink& fault_;
  CheckedBytes checked_;
};

}  // namespace

CheckedBytes verify_dcp(const std::string& folder, const std::vector<DcpEntry>& entries, const FaultSink& fault) {
  Verification verification(folder, fault);
  for (const auto& entry : entries) {
    if (const auto* tensor = entry.tensor()) verification.check_tensor(entry, *tensor);
  }
  // Values as stored, because torch_dist's reader converts some of them.
  const auto stored = read_dcp_metadata(folder);
  for (const auto& entry : stored.entries) {
    if (const auto* bytes = std::get_if<DcpBytes>(&entry.stored)) verification.check_bytes(entry, *bytes);
  }
  verification.check_overlaps(stored);
  verification.check_common();
  return verification.checked();
}

}  // namespace megashard
