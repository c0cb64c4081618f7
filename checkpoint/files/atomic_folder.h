#pragma once

#include <functional>
#include <memory>
#include <string>

namespace megashard {

/// Writes a folder PARENT/NAME atomically. Files go into the hidden PARENT/.NAME.tmp, which publish() renames. Until
/// then readers see the previous folder; a crash leaves only hidden folders. The hidden folder is locked (flock) while
/// it is written, so that no other process removes it as a leftover.
class AtomicFolder {
 public:
  explicit AtomicFolder(const std::string& path);

  const std::string& path() const { return path_; }
  const std::string& hidden() const { return hidden_; }
  /// Creates the hidden folder, empty. Throws if another process is writing it.
  void begin();
  /// Renames the hidden folder to PARENT/NAME, durably. Call it after all files are synced. An existing folder is
  /// exchanged atomically and then removed. If the file system cannot exchange, it is PARENT/.NAME.old for a moment, in
  /// which no folder has the name.
  void publish();
  /// Cleans up after a failure: removes the hidden folder and restores the name of an old one. Does not throw.
  void abandon() noexcept;

 private:
  std::string path_;
  std::string hidden_;
  std::string aside_;
  std::shared_ptr<void> lock_;
};

/// True if the hidden folder PARENT/.NAME.tmp exists: its writer is running or was interrupted.
bool is_unfinished(const std::string& path);
/// Renames the folder to PARENT/.NAME.removed, then deletes it, so that readers never see a partial folder.
void remove_atomically(const std::string& path);
/// Returns NAME of a hidden folder .NAME.old; empty for other names.
std::string name_of_aside(const std::string& hidden_name);
/// Removes leftovers of interrupted writers and removers of PARENT/NAME, for each NAME accepted by `is_ours`. Keeps
/// those that another process is writing. Restores the name of an old folder that has no replacement.
void remove_leftovers(const std::string& parent, const std::function<bool(const std::string& name)>& is_ours);

/// Exchanges two folders atomically and durably. Returns false if the file system cannot.
bool swap_folders(const std::string& one, const std::string& other);

}  // namespace megashard
