#include "parallel/sim/host_syncs.h"

#include <map>
#include <mutex>
#include <utility>

#include "parallel/sim/findings.h"

namespace megashard::sim {
namespace {

struct SyncCounts {
  std::mutex mutex;
  bool places = false;
  std::map<std::pair<std::string, std::string>, int64_t> by_place;
};
SyncCounts& sync_counts() {
  static auto* each = new SyncCounts;
  return *each;
}

}  // namespace

void count_host_sync(const char* how) {
  const std::string place = sync_counts().places ? calling_place() : "";
  const std::lock_guard lock(sync_counts().mutex);
  ++sync_counts().by_place[{how, place}];
}

void log_host_syncs(bool places) {
  const std::lock_guard lock(sync_counts().mutex);
  sync_counts().places = places;
}

std::vector<HostSync> take_host_syncs() {
  const std::lock_guard lock(sync_counts().mutex);
  std::vector<HostSync> result;
  for (const auto& [key, count] : std::exchange(sync_counts().by_place, {}))
    result.push_back({key.first, key.second, count});
  return result;
}

}  // namespace megashard::sim
