#include "framework/data/sequence_packing.h"

#include <set>
#include <utility>

namespace megashard {

std::vector<std::vector<int64_t>> pack_sequences(std::span<const int64_t> lengths, int64_t capacity) {
  std::vector<std::vector<int64_t>> rows;
  std::set<std::pair<int64_t, size_t>> rooms;  // rows with room: (tokens left, row)
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto best = rooms.lower_bound({lengths[i], 0});
    const auto [room, row] = best == rooms.end() ? std::pair(capacity, rows.size()) : *best;
    if (best == rooms.end()) {
      rows.emplace_back();
    } else {
      rooms.erase(best);
    }
    rows[row].push_back(static_cast<int64_t>(i));
    if (room > lengths[i]) rooms.emplace(room - lengths[i], row);
  }
  return rows;
}

}  // namespace megashard
