#pragma once

#include <cstdint>
#include <string>

namespace megashard::testing {

/// Simulates the disk under one folder while the object lives. It counts the calls that change the disk (open for
/// writing, write, pwrite, fallocate, ftruncate, fsync, close, rename, mkdir, unlink, rmdir), makes them fail on
/// request, and can undo them. The program defines these functions itself; its definitions take precedence over the C
/// library's, in libmegashard, too. Only one object at a time.
class FailingDisk {
 public:
  explicit FailingDisk(const std::string& folder);
  ~FailingDisk();
  FailingDisk(const FailingDisk&) = delete;
  FailingDisk& operator=(const FailingDisk&) = delete;

  /// The call after `calls` more calls fails with `error` (ENOSPC, EIO); a failing write has written half of its bytes.
  /// With `and_all_later` all later calls fail, too: the disk stays as if the program had been killed there. Error 0: a
  /// write writes half of its bytes and returns that count; other calls succeed.
  void fail_after(int64_t calls, int error, bool and_all_later);
  bool has_failed() const;
  /// The folder can be listed `times` more times; then reading its entries fails with EIO.
  void fail_listing_after(int times);
  /// From now on `call` fails for files and folders with this ending: stat, open for reading, or read.
  enum class Reading { kStatus, kOpen, kRead };
  void fail_reading(const std::string& ending, Reading call, int error);
  /// Changes one bit in every write to files with this ending, without an error.
  void spoil_writes(const std::string& ending);
  void recover();  ///< no call fails any more
  /// Makes RENAME_EXCHANGE fail, as on a file system without it.
  void refuse_exchange();
  /// Undoes the changes that a power cut may lose. Files lose unsynced bytes. kEntries: folders lose entries that were
  /// created or renamed since their last sync, but keep removals. kRemovals: the other way round.
  enum class Loss { kEntries, kRemovals };
  void lose_power(Loss loss = Loss::kEntries);
};

}  // namespace megashard::testing
