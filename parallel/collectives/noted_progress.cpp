#include "parallel/collectives/noted_progress.h"

#include <atomic>

namespace megashard {
namespace {

std::atomic<int64_t> parts = 0, answers = 0;

}  // namespace

void note_progress() { parts.fetch_add(1, std::memory_order_relaxed); }
int64_t parts_done() { return parts.load(std::memory_order_relaxed); }
void note_answer() { answers.fetch_add(1, std::memory_order_relaxed); }
int64_t progress_seen() { return parts_done() + answers.load(std::memory_order_relaxed); }

}  // namespace megashard
