#include "checkpoint/files/replace_folder.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "checkpoint/files/file_io.h"

namespace megashard {

bool swap_folders(const std::string& one, const std::string& other) {
  if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) {
    sync_directory(std::filesystem::path(other).parent_path().string());
    return true;
  }
  const bool cannot = errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP;
  TORCH_CHECK(cannot, "cannot exchange ", one, " with ", other, ": ", std::strerror(errno));
  return false;
}

void replace_folder(const std::string& old, const std::string& fresh, const std::string& aside) {
  if (swap_folders(fresh, old)) {
    remove_directory(fresh);
    return;
  }
  rename_durably(old, aside);
  rename_durably(fresh, old);
  remove_directory(aside);
}

}  // namespace megashard
