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

/// Deadline for all waits at the start of a run.
class StartDeadline {
 public:
  explicit StartDeadline(std::chrono::milliseconds timeout)
      : started_(std::chrono::steady_clock::now()), timeout_(timeout) {}
  std::chrono::milliseconds left() const;  ///< 0: passed
  std::string waited() const;              ///< "60 s"
  /// Time before one of `ranks` asks rank 0 again: a sixteenth of the time waited so far, so that the answer is seen
  /// soon, but at least 2 ms and 1 ms per 16 ranks, which all ask.
  std::chrono::milliseconds pause(int ranks) const;
  static constexpr std::chrono::milliseconds kLongestPause{256};

 private:
  std::chrono::steady_clock::time_point started_;
  std::chrono::milliseconds timeout_;
};

/// Scope that repeatedly reports which rank this one waits for: "Waiting for rank 0 at gpu1:29500 (3 s): nobody listens
/// there yet".
class WaitTeller {
 public:
  /// `notice` is called from this object's thread; null: no thread and no reports.
  WaitTeller(std::function<void(const std::string&)> notice, std::chrono::milliseconds first);
  ~WaitTeller();
  WaitTeller(const WaitTeller&) = delete;
  WaitTeller& operator=(const WaitTeller&) = delete;

  bool tells() const { return thread_.joinable(); }
  /// Sets the content of the next reports.
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

/// Returns or throws what `call` does; nothing at the deadline. `call` runs on its own thread, which is abandoned at
/// the deadline: for calls without a deadline of their own. So `call` must own everything it uses; it is destroyed
/// before the result is available. `look` (optional) is called now and then until then; what it
/// throws ends the wait as well.
template <class T>
std::optional<T> before(const StartDeadline& deadline, std::function<T()> call,
                        const std::function<void()>& look = nullptr) {
  const auto task = std::make_shared<std::packaged_task<T()>>([call = std::move(call)]() mutable {
    const std::function<T()> once = std::exchange(call, nullptr);
    return once();
  });
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  while (look != nullptr && deadline.left() > StartDeadline::kLongestPause) {
    if (result.wait_for(StartDeadline::kLongestPause) == std::future_status::ready) return result.get();
    look();
  }
  if (result.wait_for(deadline.left()) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace megashard
