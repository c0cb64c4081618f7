#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace megashard {

/// When the waits at the start of a run must be over.
class StartDeadline {
 public:
  explicit StartDeadline(std::chrono::milliseconds timeout)
      : started_(std::chrono::steady_clock::now()), timeout_(timeout) {}
  std::chrono::milliseconds left() const;  ///< 0: it has passed
  std::string waited() const;              ///< "60 s"
  /// Until one of `ranks` asks rank 0 again: a sixteenth of what it has waited, so that little is lost once the answer
  /// is there, but at least 2 ms and 1 ms for each 16 ranks, which all ask.
  std::chrono::milliseconds pause(int ranks) const;
  static constexpr std::chrono::milliseconds kLongestPause{256};

 private:
  std::chrono::steady_clock::time_point started_;
  std::chrono::milliseconds timeout_;
};

/// While it lives, says now and then for whom this rank waits: "Waiting for rank 0 at gpu1:29500
/// (3 s): nobody listens there yet".
class WaitTeller {
 public:
  /// `notice` is called from a thread of this object's; null: there is neither thread nor line.
  WaitTeller(std::function<void(const std::string&)> notice, std::chrono::milliseconds first);
  ~WaitTeller();
  WaitTeller(const WaitTeller&) = delete;
  WaitTeller& operator=(const WaitTeller&) = delete;

  bool tells() const { return thread_.joinable(); }
  /// What the next lines say.
  void wait_for(const std::string& whom, const std::string& why = "");

 private:
  void run(std::chrono::milliseconds first);

  std::function<void(const std::string&)> notice_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;
  std::string whom_, why_;
  std::thread thread_;
};

/// What `call` returns or throws; nothing at the deadline. It runs on a thread of its own, which is
/// left behind then: for calls that know no deadline. So `call` must hold all that it uses, which is let go before the
/// result is there.
template <class T>
std::optional<T> before(const StartDeadline& deadline, std::function<T()> call) {
  const auto task = std::make_shared<std::packaged_task<T()>>([call = std::move(call)]() mutable {
    const std::function<T()> once = std::exchange(call, nullptr);
    return once();
  });
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(deadline.left()) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace megashard
