#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "framework/training/appended_file.h"

namespace megashard {

/// CRC-32C (Castagnoli), as iSCSI and TensorFlow have it.
uint32_t crc32c(std::string_view bytes);

/// A file of events as TensorBoard reads them: protobufs (tensorflow.Event) in TFRecord's framing, each with its length
/// and masked checksums.
class EventFile {
 public:
  /// A new one in `folder`, which is made: "events.out.tfevents.SECONDS.HOST.PROCESS". Throws UsageError.
  explicit EventFile(const std::string& folder);

  /// A point of the curve `tag`; TensorBoard's are floats.
  void add_scalar(const std::string& tag, double value, int64_t step);
  /// Steps from this one on that earlier files of the folder have no longer count.
  void start_at(int64_t step);
  /// Throws std::runtime_error when the disk does not take what was added, which is then left out.
  void flush();

 private:
  void add(const std::string& event_fields, int64_t step);

  std::string path_;
  std::string unwritten_;
  AppendedFile file_;
};

}  // namespace megashard
