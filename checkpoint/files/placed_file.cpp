#include "checkpoint/files/placed_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace megashard {
namespace {

constexpr int64_t kMaxPlacedPerCall = 1 << 30;

int open_placed(const std::string& path, int flags) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666);
  TORCH_CHECK(descriptor >= 0, "cannot write ", path, ": ", std::strerror(errno));
  return descriptor;
}

}  // namespace

void PlacedFile::create(const std::string& path, int64_t bytes) {
  const int descriptor = open_placed(path, O_CREAT | O_TRUNC);
  const bool sized = ::ftruncate(descriptor, bytes) == 0;
  const std::string why = std::strerror(errno);
  ::close(descriptor);
  TORCH_CHECK(sized, "cannot make ", path, " ", bytes, " bytes long: ", why);
}

PlacedFile::PlacedFile(std::string path) : path_(std::move(path)), descriptor_(open_placed(path_, 0)) {}

PlacedFile::~PlacedFile() { ::close(descriptor_); }

void PlacedFile::write_at(const void* data, int64_t bytes, int64_t offset) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto put = ::pwrite(descriptor_, from, std::min(bytes, kMaxPlacedPerCall), offset);
    if (put < 0 && errno == EINTR) continue;
    TORCH_CHECK(put > 0, "writing ", path_, " at byte ", offset, " failed: ", std::strerror(errno));
    from += put;
    offset += put;
    bytes -= put;
  }
}

void PlacedFile::sync() {
  TORCH_CHECK(::fsync(descriptor_) == 0, "fsync of ", path_, " failed: ", std::strerror(errno));
}

}  // namespace megashard
