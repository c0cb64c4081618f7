#pragma once

#include <functional>
#include <memory>
#include <string>

namespace megashard {

/// A folder being written, PARENT/NAME. Its files go into the hidden PARENT/.NAME.tmp, which
/// publish() renames: until then readers see what was there before, and a crash leaves only hidden
/// folders. The hidden one is locked (flock) while it is written, so that nobody else takes it for
/// such a rest.
class AtomicFolder {
 public:
  explicit AtomicFolder(const std::string& path);

  const std::string& path() const { return path_; }
  const std::string& hidden() const { return hidden_; }
  /// Makes the hidden folder, empty. Throws when another process writes it.
  void begin();
  /// With all files synced. The hidden folder gets its name, durably. An old one of that name
  /// changes places with it at once and is removed; where the file system cannot do that, it is
  /// PARENT/.NAME.old for a moment in which nothing has the name.
  void publish();
  /// After a failure: removes what was written, and gives an old folder its name back. Does not throw.
  void abandon() noexcept;

 private:
  std::string path_;
  std::string hidden_;
  std::string aside_;
  std::shared_ptr<void> lock_;
};

/// Whether a hidden folder of that name is there: its writer is at work, or was cut short.
bool is_unfinished(const std::string& path);
/// Renames the folder to PARENT/.NAME.removed, then deletes it: readers never see half of it.
void remove_atomically(const std::string& path);
/// NAME of the hidden folder .NAME.old; empty: it is another thing.
std::string name_of_aside(const std::string& hidden_name);
/// Removes what writers and removers of PARENT/NAME that were cut short have left, for the names
/// that `is_ours`, but for what another process is writing; an old folder without a new one gets
/// its name back.
void remove_leftovers(const std::string& parent, const std::function<bool(const std::string& name)>& is_ours);

/// The two folders change places at once, durably; false where the file system cannot do that.
bool swap_folders(const std::string& one, const std::string& other);

}  // namespace megashard
