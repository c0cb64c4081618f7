#include "framework/training/appended_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace megashard {

AppendedFile::~AppendedFile() {
  if (is_open()) ::close(descriptor_);
}

bool AppendedFile::open(const std::string& path, bool anew) {
  if (is_open()) ::close(std::exchange(descriptor_, -1));
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (anew ? O_TRUNC : 0), 0666);
  return is_open();
}

bool AppendedFile::append(std::string_view piece) {
  struct stat before {};
  if (torn_at_ >= 0 && ::ftruncate(descriptor_, torn_at_) != 0) return false;
  torn_at_ = -1;
  if (::fstat(descriptor_, &before) != 0) return false;
  while (!piece.empty()) {
    const auto put = ::write(descriptor_, piece.data(), piece.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      const int error = errno;
      if (S_ISREG(before.st_mode) && ::ftruncate(descriptor_, before.st_size) != 0) torn_at_ = before.st_size;
      errno = error;
      return false;
    }
    piece.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}

}  // namespace megashard
