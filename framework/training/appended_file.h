#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace megashard {

/// A file that grows, of which readers see whole pieces: when the disk takes a part of one only, that part goes again.
class AppendedFile {
 public:
  AppendedFile() = default;
  ~AppendedFile();
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;

  /// `anew`: what it held before goes. False: it cannot be written.
  bool open(const std::string& path, bool anew);
  bool is_open() const { return descriptor_ >= 0; }
  /// At once, past no buffer. False, with errno, when the disk does not take it: a later piece may go well.
  bool append(std::string_view piece);

 private:
  int descriptor_ = -1;
  int64_t torn_at_ = -1;  // from where a part is to go yet; -1: there is none
};

}  // namespace megashard
