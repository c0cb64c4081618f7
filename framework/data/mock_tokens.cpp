#include "framework/data/mock_tokens.h"

#include <c10/util/Exception.h>

#include <bit>
#include <optional>

namespace megashard {
namespace {

constexpr size_t kSequences = 100000;
constexpr uint32_t kLengths = 4095;  // lengths 1 to 4095

__extension__ using uint128 = unsigned __int128;

constexpr uint128 join(uint64_t high, uint64_t low) { return (uint128{high} << 64) | low; }

// numpy.random.default_rng(0): PCG64 (XSL-RR) in the state that numpy seeds for 0.
class DefaultRngZero {
 public:
  // Lemire's method, as numpy's integers() for 32-bit types. [0, bound)
  uint32_t below(uint32_t bound) {
    uint64_t product = uint64_t{next32()} * bound;
    const uint32_t threshold = (0U - bound) % bound;
    while (static_cast<uint32_t>(product) < threshold) product = uint64_t{next32()} * bound;
    return static_cast<uint32_t>(product >> 32);
  }

 private:
  // Each 64-bit output gives two 32-bit numbers, low half first.
  uint32_t next32() {
    if (high_half_.has_value()) {
      const uint32_t value = *high_half_;
      high_half_.reset();
      return value;
    }
    state_ = state_ * join(0x2360ed051fc65da4, 0x4385df649fccf645) + increment_;
    const auto folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    const uint64_t value = std::rotr(folded, static_cast<int>(state_ >> 122));
    high_half_ = static_cast<uint32_t>(value >> 32);
    return static_cast<uint32_t>(value);
  }

  uint128 state_ = join(0x1aa1b5345996452d, 0x09585eb7a69561e3);
  uint128 increment_ = join(0x418ddadb3af71a82, 0x588133bc447873a9);
  std::optional<uint32_t> high_half_;
};

}  // namespace

MockTokens::MockTokens(int64_t vocab_size, int64_t eod_id) : vocab_size_(vocab_size), eod_id_(eod_id) {
  TORCH_CHECK(vocab_size > 0, "mock data needs a vocabulary; set --vocab-size");
  TORCH_CHECK(eod_id >= 0 && eod_id < vocab_size, "mock data ends documents with token ", eod_id,
              ", which is outside the vocabulary of ", vocab_size, "; give --vocab-size ", vocab_size - 1,
              ", to which NullTokenizer adds it");
  DefaultRngZero random;
  lengths_.resize(kSequences);
  for (int32_t& length : lengths_) length = static_cast<int32_t>(1 + random.below(kLengths));
}

void MockTokens::copy_tokens(int64_t sequence, int64_t offset, std::span<int64_t> out) const {
  const int64_t length = lengths_.at(static_cast<size_t>(sequence));
  TORCH_CHECK(offset >= 0 && offset + static_cast<int64_t>(out.size()) <= length, "mock sequence ", sequence, " has ",
              length, " tokens, got a request for ", out.size(), " from ", offset);
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t position = offset + static_cast<int64_t>(i);
    out[i] = position == length - 1 ? eod_id_ : (position + 1) % vocab_size_;
  }
}

}  // namespace megashard
