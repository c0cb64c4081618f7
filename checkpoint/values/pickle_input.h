#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/values/value.h"

namespace megashard {

/// Reads the bytes of a pickle sequentially. Errors are c10::Error with the file and the byte of the current opcode.
/// Lengths are checked against the remaining bytes before memory is allocated.
class PickleInput {
 public:
  PickleInput(std::string_view bytes, const std::string& where) : bytes_(bytes), where_(where) {}

  size_t size() const { return bytes_.size(); }
  unsigned char opcode();
  [[noreturn]] void fail(const std::string& what) const;

  std::string_view take(uint64_t bytes);
  uint64_t number(int bytes);  ///< little-endian
  std::string line();          ///< text up to the next newline, without it

  // Operands, by their encoding.
  double big_endian_double();
  Value long_int(std::string_view little_endian) const;  ///< two's complement
  Value text_int(std::string text) const;                ///< "12", "12L"; "00" and "01" are bools
  double text_double(const std::string& text) const;
  uint64_t text_index(const std::string& text) const;
  /// Decodes protocol 0 strings, latin1 with \uXXXX and \UXXXXXXXX, to UTF-8.
  std::string escaped_text(const std::string& text) const;

 private:
  std::string_view bytes_;
  const std::string& where_;
  size_t at_ = 0;
  size_t opcode_at_ = 0;
};

}  // namespace megashard
