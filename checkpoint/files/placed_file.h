#pragma once

#include <cstdint>
#include <string>

namespace megashard {

/// A file of known length that several ranks fill, each at places of its own.
class PlacedFile {
 public:
  /// Makes the file, `bytes` long and full of zeros; an old one of that name is replaced.
  static void create(const std::string& path, int64_t bytes);

  explicit PlacedFile(std::string path);  ///< one that create() made, maybe on another rank
  ~PlacedFile();
  PlacedFile(const PlacedFile&) = delete;
  PlacedFile& operator=(const PlacedFile&) = delete;

  void write_at(const void* data, int64_t bytes, int64_t offset);
  /// What was written here is on the disk (fsync).
  void sync();

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace megashard
