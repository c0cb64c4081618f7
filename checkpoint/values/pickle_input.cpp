#include "checkpoint/values/pickle_input.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstring>

namespace megashard {
namespace {

/// Parses the whole text as a number.
template <class Number>
bool parse_whole(std::string_view text, Number& value, int base = 10) {
  std::from_chars_result result{};
  if constexpr (std::is_integral_v<Number>) {
    result = std::from_chars(text.data(), text.data() + text.size(), value, base);
  } else {
    result = std::from_chars(text.data(), text.data() + text.size(), value);
  }
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

void append_utf8(std::string& utf8, uint32_t code) {
  const auto tail = [&](int shift) { utf8 += static_cast<char>(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    utf8 += static_cast<char>(code);
  } else if (code < 0x800) {
    utf8 += static_cast<char>(0xc0 | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    utf8 += static_cast<char>(0xe0 | code >> 12);
    tail(6);
    tail(0);
  } else {
    utf8 += static_cast<char>(0xf0 | code >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace

unsigned char PickleInput::opcode() {
  opcode_at_ = at_;
  return static_cast<unsigned char>(take(1)[0]);
}

void PickleInput::fail(const std::string& what) const {
  TORCH_CHECK(false, where_, ": at byte ", opcode_at_, ": ", what);
}

std::string_view PickleInput::take(uint64_t bytes) {
  if (bytes > bytes_.size() - at_) fail("the pickle is truncated");
  const auto part = bytes_.substr(at_, bytes);
  at_ += bytes;
  return part;
}

uint64_t PickleInput::number(int bytes) {
  const auto part = take(static_cast<uint64_t>(bytes));
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(part[i]);
  return value;
}

std::string PickleInput::line() {
  const auto end = bytes_.find('\n', at_);
  if (end == std::string_view::npos) fail("the pickle is truncated");
  const auto part = take(end - at_ + 1);
  return std::string(part.substr(0, part.size() - 1));
}

double PickleInput::big_endian_double() {
  uint64_t bits = 0;
  for (const char c : take(8)) bits = bits << 8 | static_cast<unsigned char>(c);
  double value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

Value PickleInput::long_int(std::string_view little_endian) const {
  if (little_endian.size() > 8) return BigInt{std::string(little_endian)};
  uint64_t value = little_endian.empty() || (little_endian.back() & 0x80) == 0 ? 0 : ~uint64_t{0};
  for (size_t i = little_endian.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(little_endian[i]);
  return static_cast<int64_t>(value);
}

Value PickleInput::text_int(std::string text) const {
  if (text == "00" || text == "01") return text == "01";
  if (text.ends_with('L')) text.pop_back();
  int64_t value = 0;
  if (!parse_whole(text, value)) fail("\"" + text.substr(0, 40) + "\" is no int of 64 bits");
  return value;
}

double PickleInput::text_double(const std::string& text) const {
  double value = 0;
  if (!parse_whole(text, value)) fail("\"" + text.substr(0, 40) + "\" is no float");
  return value;
}

uint64_t PickleInput::text_index(const std::string& text) const {
  uint64_t index = 0;
  if (!parse_whole(text, index)) fail("a memo index that is no number");
  return index;
}

std::string PickleInput::escaped_text(const std::string& text) const {
  std::string utf8;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool escape = byte == '\\' && i + 1 < text.size() && (text[i + 1] == 'u' || text[i + 1] == 'U');
    if (!escape) {
      append_utf8(utf8, byte);
      continue;
    }
    const size_t digits = text[i + 1] == 'u' ? 4 : 8;
    uint32_t code = 0;
    const bool fits = digits <= text.size() - i - 2 &&
                      parse_whole(std::string_view(text).substr(i + 2, digits), code, 16) && code <= 0x10ffff;
    if (!fits) fail("a string with an escape that is none");
    append_utf8(utf8, code);
    i += 1 + digits;
  }
  return utf8;
}

}  // namespace megashard
