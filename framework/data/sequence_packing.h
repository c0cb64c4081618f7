#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megashard {

/// Packs whole sequences into rows of at most `capacity` tokens, by best fit in the given order: each sequence goes
/// into the row with the least room that fits (the earlier row on ties), or starts a new row. `lengths` must be in
/// [1, capacity]. Returns the indices into `lengths` of each row, ascending in a row; rows are in the order in which
/// they were started. Deterministic.
std::vector<std::vector<int64_t>> pack_sequences(std::span<const int64_t> lengths, int64_t capacity);

}  // namespace megashard
