#pragma once

#include <string>
#include <vector>

namespace megashard {

/// Prevents a second run from saving to the same directory during this object's lifetime, by a lock (flock) on
/// DIRECTORY/.run, which names the holder. The lock ends with the process.
class RunLock {
 public:
  /// Creates the directory. Throws an error that names the other process if the lock is taken.
  explicit RunLock(const std::string& directory);
  /// Removes the file, unless another run has taken it, and the folders that the constructor created if they are empty.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Returns true if the directory or the file was removed or renamed. Then creates and locks it again, or throws the
  /// constructor's error if another run has it.
  bool take_again();
  /// False if the file system has no locks; then no other run is prevented.
  bool is_held() const { return descriptor_ >= 0; }

 private:
  bool take();
  bool is_ours() const;

  std::string path_;
  std::vector<std::string> made_;  // created folders, the innermost first
  int descriptor_ = -1;
  bool has_locks_ = true;  // the file system supports locks
};

}  // namespace megashard
