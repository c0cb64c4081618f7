#include "parallel/collectives/rendezvous_members.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>

#include "parallel/collectives/rendezvous_store.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr size_t kRanksNamed = 4;  // maximum number of ranks named in a line

constexpr const char* kWorldSize = "megashard/world_size";
constexpr const char* kMembers = "megashard/members";
constexpr const char* kVerdict = "megashard/verdict";  // kAllCame or an error message
constexpr const char* kAllCame = "all came";
constexpr const char* kMissing = "megashard/missing";  // rank 0's last count of missing ranks, and their names

std::string rank_key(int rank) { return "megashard/rank/" + std::to_string(rank); }

std::vector<uint8_t> text_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string read(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.get(key);
  return std::string(bytes.begin(), bytes.end());
}

/// "rank 3" or "ranks 1, 2, 3, 4 and 60 more". Rank 0 checks each rank; the others, possibly thousands, read only the
/// count: ranks never leave, so an equal count means that rank 0's names still hold.
std::string missing_ranks(c10d::Store& store, const RendezvousOptions& options) {
  if (options.rank != 0) {
    const auto count = std::to_string(options.world_size - store.add(kMembers, 0));
    const std::string seen = store.check({kMissing}) ? read(store, kMissing) : "";
    if (seen.starts_with(count + " ")) return seen.substr(count.size() + 1);
    return count + (count == "1" ? " other rank" : " other ranks");
  }
  std::string names;
  size_t count = 0;
  for (int rank = 1; rank < options.world_size; ++rank) {
    if (store.check({rank_key(rank)})) continue;
    if (++count <= kRanksNamed) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (count > kRanksNamed) names += " and " + std::to_string(count - kRanksNamed) + " more";
  names = (count == 1 ? "rank " : "ranks ") + names;
  store.set(kMissing, text_bytes(std::to_string(count) + " " + names));
  return names;
}

/// Waits for `key`; false at the deadline. Calls `look` at growing intervals of at most 8 s.
bool await_key(c10d::Store& store, const std::string& key, const StartDeadline& deadline, int ranks,
               const std::function<void()>& look) {
  auto next_look = std::chrono::steady_clock::now() + Milliseconds(500);
  auto between = Milliseconds(500);
  while (true) {
    if (store.check({key})) return true;
    if (deadline.left() == Milliseconds(0)) return false;
    if (std::chrono::steady_clock::now() >= next_look) {
      look();
      next_look += between = std::min(2 * between, Milliseconds(8000));
    }
    std::this_thread::sleep_for(deadline.pause(ranks));
  }
}

[[noreturn]] void fail_for_all(c10d::Store& store, const std::string& message) {
  store.compareSet(kVerdict, {}, text_bytes(message));
  TORCH_CHECK(false, message);
}

/// Registers this rank and checks that it is valid.
void register_rank(c10d::Store& store, const RendezvousOptions& options, const std::string& gpu,
                   const StartDeadline& deadline, WaitTeller& teller) {
  const std::string rank = std::to_string(options.rank);
  const bool first = store.add(rank_key(options.rank), 1) == 1;
  if (options.rank == 0 && first) store.set(kWorldSize, text_bytes(std::to_string(options.world_size)));
  const std::string place = meeting_place(options);
  teller.wait_for("rank 0 at " + place);
  TORCH_CHECK(await_key(store, kWorldSize, deadline, options.world_size, [] {}), "rank ", rank, " of ",
              options.world_size, " waited ", deadline.waited(), " for rank 0 to come to ", place,
              ": start it, or raise --distributed-timeout-minutes");
  if (!first) {
    fail_for_all(store, options.init_method.starts_with("file://")
                            ? "another process already was rank " + rank + " in " + place + ": give each run a new file"
                            : "two processes are rank " + rank + ": give each its own RANK, and each job its own port");
  }
  const std::string world = read(store, kWorldSize);
  if (world != std::to_string(options.world_size)) {
    fail_for_all(store, "rank " + rank + " was started for a world of " + std::to_string(options.world_size) +
                            ", rank 0 for one of " + world + ": give every rank the same WORLD_SIZE");
  }
  if (!gpu.empty() && store.add("megashard/gpu/" + gpu, 1) > 1) {
    fail_for_all(store, "rank " + rank +
                            " has the GPU of another rank: start at most as many ranks on a "
                            "machine as it has GPUs, and let each see all of them or one of its own");
  }
}

}  // namespace

void meet_all_ranks(c10d::Store& store, const RendezvousOptions& options, const std::string& gpu,
                    const StartDeadline& deadline, WaitTeller& teller) {
  std::string verdict;
  try {
    register_rank(store, options, gpu, deadline, teller);
    if (store.add(kMembers, 1) == options.world_size) store.compareSet(kVerdict, {}, text_bytes(kAllCame));
    teller.wait_for("the other ranks");
    const bool told = await_key(store, kVerdict, deadline, options.world_size, [&] {
      const std::string of = " of " + std::to_string(options.world_size);
      if (teller.tells() || options.rank == 0) teller.wait_for(missing_ranks(store, options) + of);
    });
    if (!told) {
      const auto message =
          c10::str("rank ", options.rank, " of ", options.world_size, " waited ", deadline.waited(), " for ",
                   missing_ranks(store, options), ", which did not come to ", meeting_place(options),
                   ": start every rank with the same address and WORLD_SIZE, or raise --distributed-timeout-minutes");
      store.compareSet(kVerdict, {}, text_bytes(message));  // the first rank that gives up ends all
    }
    verdict = read(store, kVerdict);
  } catch (const c10::DistError& error) {
    TORCH_CHECK(false, "rank ", options.rank, " of ", options.world_size, " lost ", meeting_place(options),
                ", where the ranks meet: see whether rank 0 ended, and check the network to it [", first_line(error),
                "]");
  } catch (const std::exception& error) {
    if (!is_short_of_memory(error)) throw;
    verdict = short_of_memory(options.rank, error);
    store.compareSet(kVerdict, {}, text_bytes(verdict));
  }
  if (verdict == kAllCame) return;
  // Other ranks read it from rank 0's store, which ends with rank 0.
  if (options.rank == 0) std::this_thread::sleep_for(2 * StartDeadline::kLongestPause);
  TORCH_CHECK(false, verdict);
}

}  // namespace megashard
