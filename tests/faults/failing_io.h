#pragma once

#include <cstdint>
#include <string>

namespace megashard::testing {

/// The disk under one folder, for the time that this lives: calls that change it (open for writing,
/// write, pwrite, fallocate, ftruncate, fsync, close, rename, mkdir, unlink, rmdir) are counted,
/// fail where a test says so, and can be taken back. The program's own definitions of these
/// functions stand before the C library's, for libmegashard too. One at a time.
class FailingDisk {
 public:
  explicit FailingDisk(const std::string& folder);
  ~FailingDisk();
  FailingDisk(const FailingDisk&) = delete;
  FailingDisk& operator=(const FailingDisk&) = delete;

  /// From now on, the call after `calls` others fails with `error` (ENOSPC, EIO; a write has put
  /// half of its bytes); with `and_all_later` the rest too: the disk stays as if the program had
  /// been killed there. Error 0: a write puts half of its bytes and says so, other calls go well.
  void fail_after(int64_t calls, int error, bool and_all_later);
  bool has_failed() const;
  /// The folder can be listed so many times more; then reading its entries fails with EIO.
  void fail_listing_after(int times);
  /// From now on files and folders of this ending cannot be looked at, opened to be read, or read.
  enum class Reading { kStatus, kOpen, kRead };
  void fail_reading(const std::string& ending, Reading call, int error);
  /// One bit of every write to files of this ending changes, and nobody is told.
  void spoil_writes(const std::string& ending);
  void recover();  ///< nothing fails any more
  /// As a file system without RENAME_EXCHANGE.
  void refuse_exchange();
  /// What a power cut takes: files lose what was not synced; folders lose the entries that were
  /// made or renamed since they were synced, while removals stay, or the other way round.
  enum class Loss { kEntries, kRemovals };
  void lose_power(Loss loss = Loss::kEntries);
};

}  // namespace megashard::testing
