#include "parallel/collectives/gloo_connect.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <thread>

#include "parallel/collectives/deadline_store.h"
#include "parallel/collectives/start_wait.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

namespace {

using Milliseconds = std::chrono::milliseconds;
using GlooPtr = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr int kAttempts = 3;
constexpr const char* kGivenUp = "given_up";  // set by a member that cannot try again
constexpr Milliseconds kLongestPause{256};

/// Time of an attempt; a member whose peer gave up may wait for all of it: a twentieth of the group's deadline at
/// first, then four times as much, and in the last attempt all that is left except the time to tell the others.
Milliseconds time_for(int attempt, const ProcessGroup& group, Milliseconds left) {
  if (attempt == kAttempts - 1) return left - std::min(left / 2, std::max(left / 8, Milliseconds(1000)));
  return std::clamp(group.timeout() / 20 * (1 << (2 * attempt)), Milliseconds(1), left);
}

GlooPtr connect_once(int rank, int size, StorePtr store, const std::string& address, Milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  // c10d's threads run collectives; messages need only the device's own thread.
  options->threads = 0;
  options->devices = address.empty() ? c10d::ProcessGroupGloo::Options::create_default(timeout)->devices
                                     : std::vector{c10d::ProcessGroupGloo::createDeviceForHostname(address)};
  return c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), rank, size, std::move(options));
}

/// Polls at growing intervals: a store's wait that ends early would warn on stderr.
void wait_for_key(c10d::Store& store, const std::string& key, const std::function<Milliseconds()>& left,
                  const std::function<void()>& look) {
  for (Milliseconds pause(1); look != nullptr && left() > pause; pause = std::min(2 * pause, kLongestPause)) {
    if (store.check({key})) return;
    std::this_thread::sleep_for(pause);
    if (pause < kLongestPause) continue;
    try {
      look();
    } catch (const std::exception&) {  // a rank that has met all others may leave
      if (store.check({key})) return;
      throw;
    }
  }
  store.wait({key}, left());
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

GlooPtr connect_gloo(const ProcessGroup& group, const StorePtr& group_store, const std::string& address,
                     const std::function<void()>& look) {
  const auto started = std::chrono::steady_clock::now();
  const auto waited = [&] { return std::chrono::steady_clock::now() - started; };
  const StartDeadline deadline(group.timeout());
  const auto left = [deadline] { return std::max(deadline.left(), Milliseconds(1)); };
  const StorePtr store = c10::make_intrusive<DeadlineStore>(group_store, left);
  const auto enter = [&](const std::string& place) {
    if (store->add(place + "/members", 1) == group.size()) store->set(place + "/complete", bytes_of("1"));
  };
  const auto meet = [&](const std::string& place) {
    enter(place);
    wait_for_key(*store, place + "/complete", left, look);
  };
  std::string failure;
  try {
    store->setTimeout(group.timeout());
    meet("start");  // members may start minutes apart; then connecting is quick
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const std::string place = "attempt_" + std::to_string(attempt);
      const std::string failure_key = place + "/failure";
      const auto attempt_once = [rank = group.rank(), size = group.size(), address,
                                 keys = c10::make_intrusive<c10d::PrefixStore>(place, store),
                                 time = time_for(attempt, group, left())] {
        return connect_once(rank, size, keys, address, time);
      };
      std::optional<GlooPtr> gloo = GlooPtr();
      try {
        // If packets are lost, Gloo takes five times its timeout.
        gloo = before<GlooPtr>(deadline, attempt_once);
      } catch (const std::exception& error) {
        const std::string cause = "rank " + std::to_string(group.rank()) + ": " + first_line(error);
        store->compareSet(failure_key, {}, bytes_of(cause));  // the first failure is reported
        if (is_short_of_memory(error)) {
          store->set(kGivenUp, bytes_of(cause));
          enter(place);
          throw;
        }
      }
      TORCH_CHECK(gloo, "Gloo has no answer from another rank's machine: check the network between them");
      meet(place);  // then all members know of every failure
      if (!store->check({failure_key})) {
        (*gloo)->setTimeout(group.timeout());
        return *gloo;
      }
      const bool is_last = store->check({kGivenUp});
      const auto bytes = store->get(is_last ? kGivenUp : failure_key);
      failure.assign(bytes.begin(), bytes.end());
      if (is_last) break;
    }
  } catch (const std::exception& error) {
    if (is_short_of_memory(error)) throw_short_of_memory(group.ranks()[static_cast<size_t>(group.rank())], error);
    throw_wait_error("connecting to the other ranks", group, -1, waited(), error);
  }
  throw_wait_error("connecting to the other ranks", group, -1, waited(), std::runtime_error(failure));
}

}  // namespace megashard
