#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megashard {

/// Rows of whole sequences, by best fit in the order that they come in: each goes into the row with the least room
/// that still holds it, the earlier of two, or else begins a row. Returns, row by row in the order in which rows began,
/// the indices into `lengths`, which rise in a row. lengths: each from 1 to `capacity`, in tokens. The rows depend on
/// nothing else, and the sequences of one take at most `capacity` tokens.
std::vector<std::vector<int64_t>> pack_sequences(std::span<const int64_t> lengths, int64_t capacity);

}  // namespace megashard
