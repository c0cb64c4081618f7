#include "checkpoint/files/mapped_ranges.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <climits>
#include <csignal>
#include <cstring>
#include <mutex>
#include <string_view>

namespace megashard {
namespace {

/// Reused but never freed: a signal handler may walk the list at any time.
struct MappedRange {
  std::atomic<uintptr_t> begin = 0;
  std::atomic<size_t> bytes = 0;  // 0: free
  std::atomic<const char*> path = nullptr;
  MappedRange* next = nullptr;
};
std::atomic<MappedRange*> first_range = nullptr;
std::mutex ranges_change;

std::atomic<void (*)(const char* message)> end_of_process = nullptr;
struct sigaction bus_error_before {};

/// A buffer for text in a signal handler, where allocation is not allowed.
class FixedText {
 public:
  void add(std::string_view text) {
    const auto bytes = std::min(text.size(), sizeof text_ - 1 - length_);
    std::memcpy(text_ + length_, text.data(), bytes);
    length_ += bytes;
    text_[length_] = '\0';
  }
  void add(int64_t number) {
    char digits[24];
    const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
    add(std::string_view(digits, static_cast<size_t>(end - digits)));
  }
  const char* c_str() const { return text_; }

 private:
  char text_[PATH_MAX + 400] = "";
  size_t length_ = 0;
};

void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  const bool is_touch = info->si_code > 0;  // a memory access, not a sent signal
  for (const MappedRange* each = first_range; each != nullptr; each = each->next) {
    const size_t bytes = each->bytes, offset = address - each->begin;
    if (!is_touch || offset >= bytes) continue;
    const char* path = each->path;
    static FixedText text;
    struct stat status {};
    text.add(path);
    if (::stat(path, &status) == 0 && status.st_size < static_cast<int64_t>(bytes)) {
      text.add(" was made shorter while it is read: it has ");
      text.add(status.st_size);
      text.add(" bytes, and had ");
      text.add(static_cast<int64_t>(bytes));
      text.add("; write it again, and leave files alone that a run reads");
    } else {
      text.add(" cannot be read: its disk does not give what is at byte ");
      text.add(static_cast<int64_t>(offset));
      text.add(", or somebody has replaced the file");
    }
    (*end_of_process.load())(text.c_str());
  }
  ::sigaction(signal, &bus_error_before, nullptr);  // the access is repeated
  if (!is_touch) ::raise(signal);
}

}  // namespace

void note_mapped_range(const char* path, const void* begin, int64_t bytes) {
  const std::lock_guard lock(ranges_change);
  MappedRange* place = first_range;
  while (place != nullptr && place->bytes != 0) place = place->next;
  const bool is_new = place == nullptr;
  if (is_new) place = new MappedRange;
  place->begin = reinterpret_cast<uintptr_t>(begin);
  place->path = path;
  place->bytes = static_cast<size_t>(bytes);
  if (!is_new) return;
  place->next = first_range;
  first_range = place;
}

void forget_mapped_range(const void* begin) {
  const std::lock_guard lock(ranges_change);
  for (MappedRange* each = first_range; each != nullptr; each = each->next)
    if (each->begin == reinterpret_cast<uintptr_t>(begin)) each->bytes = 0;
}

void end_at_lost_bytes(void (*end)(const char* message)) {
  end_of_process = end;
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, &bus_error_before);
}

}  // namespace megashard
