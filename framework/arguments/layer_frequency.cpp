#include "framework/arguments/layer_frequency.h"

#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

#include "framework/mistakes.h"

namespace megashard {
namespace {

/// Reads sums and products of Python lists of 0 and 1.
class ListReader {
 public:
  ListReader(const char* flag, const std::string& text) : flag_(flag), text_(text) {}

  std::vector<bool> whole() {
    auto layers = sum();
    expect(text_.empty());
    return layers;
  }

 private:
  std::vector<bool> sum() {
    auto layers = product();
    while (take('+')) {
      const auto more = product();
      layers.insert(layers.end(), more.begin(), more.end());
    }
    return layers;
  }
  std::vector<bool> product() {
    const auto once = list();
    auto layers = once;
    while (take('*')) {
      const auto times = number();
      expect(times > 0 && times <= kMost);
      const auto factor = std::exchange(layers, {});
      for (int64_t i = 0; i < times; ++i) layers.insert(layers.end(), factor.begin(), factor.end());
      expect(std::ssize(layers) <= kMost);
    }
    return layers;
  }
  std::vector<bool> list() {
    if (take('(')) {
      auto layers = sum();
      expect(take(')'));
      return layers;
    }
    std::vector<bool> layers;
    expect(take('['));
    do {
      const auto each = number();
      expect(each == 0 || each == 1);
      layers.push_back(each == 1);
    } while (take(','));
    expect(take(']'));
    return layers;
  }
  int64_t number() {
    skip_spaces();
    int64_t value = 0;
    const auto read = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    expect(read.ec == std::errc());
    text_.remove_prefix(static_cast<size_t>(read.ptr - text_.data()));
    return value;
  }
  bool take(char wanted) {
    skip_spaces();
    if (!text_.starts_with(wanted)) return false;
    text_.remove_prefix(1);
    return true;
  }
  void skip_spaces() {
    while (text_.starts_with(' ')) text_.remove_prefix(1);
  }
  void expect(bool fits) const {
    require(fits, std::string(flag_) + " takes an interval, or 0 and 1 for each layer: 2, or [0]*1+[1]*26");
  }

  static constexpr int64_t kMost = 100000;  // layers
  const char* flag_;
  std::string_view text_;
};

bool is_selected(LayerFlag::Selects selects, int64_t layer, int64_t interval) {
  const bool is_last = (layer + 1) % interval == 0;
  switch (selects) {
    case LayerFlag::Selects::kFirst:
      return layer % interval == 0;
    case LayerFlag::Selects::kLast:
      return is_last;
    case LayerFlag::Selects::kAllButLast:
      break;
  }
  return !is_last;
}

}  // namespace

std::vector<bool> expand_layer_frequency(const LayerFlag& flag, const std::string& frequency, int64_t num_layers) {
  int64_t interval = 0;
  const auto read = std::from_chars(frequency.data(), frequency.data() + frequency.size(), interval);
  std::vector<bool> layers;
  if (read.ec == std::errc() && read.ptr == frequency.data() + frequency.size() && interval > 0) {
    for (int64_t layer = 0; layer < num_layers; ++layer) layers.push_back(is_selected(flag.selects, layer, interval));
    return layers;
  }
  layers = ListReader(flag.name, frequency).whole();
  require(std::ssize(layers) == num_layers, std::string(flag.name) + " " + frequency + " describes " +
                                                std::to_string(layers.size()) + " layers, and the model has " +
                                                std::to_string(num_layers) + "; change one of them");
  return layers;
}

}  // namespace megashard
