#pragma once

#include <cstdint>
#include <string>

namespace megashard {

/// A file of known length that several ranks fill at different offsets.
class PlacedFile {
 public:
  /// Creates the file with `bytes` zeros; replaces an existing one.
  static void create(const std::string& path, int64_t bytes);

  explicit PlacedFile(std::string path);  ///< opens a file that create() made, possibly on another rank
  ~PlacedFile();
  PlacedFile(const PlacedFile&) = delete;
  PlacedFile& operator=(const PlacedFile&) = delete;

  void write_at(const void* data, int64_t bytes, int64_t offset);
  /// Syncs this process's writes to disk (fsync).
  void sync();

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace megashard
