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
constexpr const char* kGivenUp = "given_up";  // what ended a member that cannot try again
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

std::string text_at(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

std::string failure_key(const std::string& place) { return place + "/failure"; }
std::string complete_key(const std::string& place) { return place + "/complete"; }

/// What ended another member.
class GivenUpError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

void throw_if_given_up(c10d::Store& store) {
  if (!store.check({kGivenUp})) return;
  throw GivenUpError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text_at(store, kGivenUp));
}

/// This member, which is at `place`, can connect to nobody: none of the others waits for it any longer.
[[noreturn]] void give_up(c10d::Store& store, const std::string& place, const ProcessGroup& group,
                          const std::exception& error) {
  const int rank = group.ranks()[static_cast<size_t>(group.rank())];
  const std::vector<uint8_t> why = bytes_of(short_of_memory(rank, error));
  try {
    store.set(kGivenUp, why);
    store.compareSet(failure_key(place), {}, why);
    store.set(complete_key(place), bytes_of("1"));
    // The others read it from the store of rank 0, which ends with it.
    if (rank == 0) std::this_thread::sleep_for(2 * StartDeadline::kLongestPause);
  } catch (const std::exception&) {  // what this rank could not tell the others it tells its user
  }
  throw_short_of_memory(rank, error);
}

}  // namespace

GlooPtr connect_gloo(const ProcessGroup& group, const StorePtr& group_store, const std::string& address,
                     const std::function<void()>& look) {
  const auto started = std::chrono::steady_clock::now();
  const auto waited = [&] { return std::chrono::steady_clock::now() - started; };
  const StartDeadline deadline(group.timeout());
  const auto left = [deadline] { return std::max(deadline.left(), Milliseconds(1)); };
  const StorePtr store = c10::make_intrusive<DeadlineStore>(group_store, left);
  const auto meet = [&](const std::string& place) {
    if (store->add(place + "/members", 1) == group.size()) store->set(complete_key(place), bytes_of("1"));
    wait_for_key(*store, complete_key(place), left, look);
  };
  // A store's wait, which is Gloo's here, makes its other calls wait: this one is asked through a connection of its
  // own.
  const auto look_for_the_end = [store, asked = StorePtr()]() mutable {
    if (asked == nullptr) asked = store->clone();
    throw_if_given_up(*asked);
  };
  std::string place = "start", failure;
  try {
    store->setTimeout(group.timeout());
    meet(place);  // members may start minutes apart; then connecting is quick
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      place = "attempt_" + std::to_string(attempt);
      const auto attempt_once = [rank = group.rank(), size = group.size(), address,
                                 keys = c10::make_intrusive<c10d::PrefixStore>(place, store),
                                 time = time_for(attempt, group, left())] {
        return connect_once(rank, size, keys, address, time);
      };
      std::optional<GlooPtr> gloo = GlooPtr();
      try {
        // If packets are lost, Gloo takes five times its timeout.
        gloo = before<GlooPtr>(deadline, attempt_once, look_for_the_end);
      } catch (const std::exception& error) {
        if (is_short_of_memory(error) || dynamic_cast<const GivenUpError*>(&error) != nullptr) throw;
        const std::string cause = "rank " + std::to_string(group.rank()) + ": " + first_line(error);
        store->compareSet(failure_key(place), {}, bytes_of(cause));  // the first failure is reported
      }
      TORCH_CHECK(gloo, "Gloo has no answer from another rank's machine: check the network between them");
      meet(place);  // then all members know of every failure
      if (!store->check({failure_key(place)})) {
        (*gloo)->setTimeout(group.timeout());
        return *gloo;
      }
      throw_if_given_up(*store);
      failure = text_at(*store, failure_key(place));
    }
  } catch (const GivenUpError&) {
    throw;
  } catch (const std::exception& error) {
    if (is_short_of_memory(error)) give_up(*store, place, group, error);
    throw_wait_error("connecting to the other ranks", group, -1, waited(), error);
  }
  throw_wait_error("connecting to the other ranks", group, -1, waited(), std::runtime_error(failure));
}

}  // namespace megashard
