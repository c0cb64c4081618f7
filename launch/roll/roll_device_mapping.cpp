#include <charconv>
#include <set>
#include <string_view>

#include "launch/roll/roll_worker.h"

namespace megashard {
namespace {

constexpr int64_t kMaxDevices = 1 << 20;

/// Parses a Python expression of lists and ranges from left to right.
class DeviceReader {
 public:
  explicit DeviceReader(std::string_view text) : rest_(text) {}

  std::optional<std::vector<int64_t>> read() {
    do {
      if (!term()) return std::nullopt;
    } while (take("+"));
    skip_spaces();
    const std::set<int64_t> distinct(devices_.begin(), devices_.end());
    if (!rest_.empty() || distinct.size() != devices_.size()) return std::nullopt;
    return devices_;
  }

 private:
  bool term() {
    if (take("list")) {
      return take("(") && term() && take(")");
    }
    if (take("range")) return take("(") && range() && take(")");
    if (!take("[")) return false;
    if (take("]")) return true;
    do {
      const auto device = number();
      if (!device) return false;
      devices_.push_back(*device);
    } while (take(","));
    return take("]");
  }

  bool range() {
    std::vector<int64_t> words;
    do {
      const auto word = number();
      if (!word || words.size() == 3) return false;
      words.push_back(*word);
    } while (take(","));
    const int64_t begin = words.size() == 1 ? 0 : words[0];
    const int64_t end = words.size() == 1 ? words[0] : words[1];
    const int64_t step = words.size() == 3 ? words[2] : 1;
    if (step < 1 || end - begin > kMaxDevices) return false;
    for (int64_t device = begin; device < end; device += step) devices_.push_back(device);
    return true;
  }

  std::optional<int64_t> number() {
    skip_spaces();
    int64_t value = 0;
    const auto result = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (result.ec != std::errc() || value < 0 || value > kMaxDevices) return std::nullopt;
    rest_.remove_prefix(static_cast<size_t>(result.ptr - rest_.data()));
    return value;
  }

  bool take(std::string_view word) {
    skip_spaces();
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  void skip_spaces() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\n"), rest_.size())); }

  std::string_view rest_;
  std::vector<int64_t> devices_;
};

}  // namespace

std::optional<std::vector<int64_t>> parse_device_mapping(const std::string& text) { return DeviceReader(text).read(); }

}  // namespace megashard
