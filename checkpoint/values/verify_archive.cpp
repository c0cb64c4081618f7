#include "checkpoint/values/verify_archive.h"

#include <c10/util/Exception.h>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/unreadable_error.h"

namespace megashard {

CheckedBytes verify_archive(const TorchArchive& archive, const std::string& item, const FaultSink& fault) {
  CheckedBytes checked;
  for (const auto& [name, entry] : archive.entries()) {
    try {
      const auto range = archive.locate(name);
      const auto sum = crc32_of(archive.file(), range.offset, range.length);
      checked.bytes += range.length;
      // 0: written with torch.serialization.set_crc32_options(False)
      if (entry.crc32 == 0 && sum != 0) {
        checked.without_checksum += range.length;
      } else if (entry.crc32 != sum) {
        fault(archive.where() + ": entry " + name + " of " + item + " is damaged (its CRC-32 is " +
              std::to_string(sum) + ", not " + std::to_string(entry.crc32) + ")");
      }
    } catch (const UnreadableError&) {
      throw;
    } catch (const c10::Error& error) {
      fault(std::string(error.what_without_backtrace()) + " (" + item + ")");
    }
  }
  return checked;
}

}  // namespace megashard
