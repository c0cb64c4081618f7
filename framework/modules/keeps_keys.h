#pragma once

#include <cstdint>
#include <string>

namespace megashard {

/// A model that can keep keys and values between forwards, so that later tokens of a sequence need no earlier ones.
class KeepsKeys {
 public:
  virtual ~KeepsKeys() = default;
  /// The reason why it cannot, for a message ("it takes pictures"); empty: it can.
  virtual std::string why_no_keys() const = 0;
  /// True if positions turn by the length of a batch's longest text, so that texts of one batch change each other.
  virtual bool turns_by_length() const = 0;
  /// Forwards from now on keep keys and values, of at most `capacity` tokens a row. The first one takes the tokens of
  /// the positions 0, 1, ...; each later one takes a token a row at the position that Batch::position_ids gives, and
  /// sees the tokens at the positions before. Rows are the same in all of them, and whole sequences.
  virtual void keep_keys(int64_t capacity) = 0;
  virtual void drop_keys() = 0;
};

}  // namespace megashard
