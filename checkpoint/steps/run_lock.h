#pragma once

#include <string>
#include <vector>

namespace megashard {

/// Keeps a second run from saving to the same directory, for as long as this lives: a lock (flock)
/// on DIRECTORY/.run, which says who has it. A process that ends, however it does, has it no more.
class RunLock {
 public:
  /// Makes the directory. Throws an error that names the other process when the lock is taken.
  explicit RunLock(const std::string& directory);
  /// Removes the file, unless it is another run's by now, and of the folders that it made those that are still empty.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Whether somebody has removed or renamed the directory, or the file: it is then made and locked anew, or another
  /// run's error thrown, as in the constructor.
  bool take_again();
  /// False where the file system has no locks: then nobody is kept out.
  bool is_held() const { return descriptor_ >= 0; }

 private:
  bool take();
  bool is_ours() const;

  std::string path_;
  std::vector<std::string> made_;  // folders, the innermost first
  int descriptor_ = -1;
  bool has_locks_ = true;  // the file system
};

}  // namespace megashard
