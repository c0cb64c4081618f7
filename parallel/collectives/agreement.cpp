#include "parallel/collectives/agreement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "parallel/collectives/noted_progress.h"
#include "parallel/collectives/routed_process_group.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {
namespace {

// First character of a rank's message; the result or the error message follows.
constexpr char kDone = '.';
constexpr char kFailed = '!';
constexpr char kValueError = 'v';
constexpr char kNotImplemented = 'n';
constexpr char kPeerLost = 'd';
constexpr char kWorking = 'w';  // followed by the milliseconds without progress

char outcome_of(const std::exception& error) {
  if (dynamic_cast<const c10::ValueError*>(&error) != nullptr) return kValueError;
  if (dynamic_cast<const c10::DistError*>(&error) != nullptr) return kPeerLost;
  return dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr ? kNotImplemented : kFailed;
}

std::string run(const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const std::exception& error) {
    return outcome_of(error) + error_text(error);
  }
}

/// Thread that reports to the other ranks that this rank is working, until all have finished.
class WorkingExchange {
 public:
  explicit WorkingExchange(ProcessGroup& group)
      : group_(group), period_(std::clamp(group.timeout() / 60, kShortestPeriod, kLongestPeriod)) {
    try {
      thread_ = std::thread([this, place = place_of_this_thread()] {
        const WaitPlace here(place);
        exchange();
      });
    } catch (const std::system_error&) {  // no thread available: no reports until this rank is done
    }
  }
  ~WorkingExchange() {
    if (thread_.joinable()) thread_.join();
  }
  WorkingExchange(const WorkingExchange&) = delete;
  WorkingExchange& operator=(const WorkingExchange&) = delete;

  /// Returns the results of all ranks; this rank's is `result`.
  std::vector<std::string> finish(std::string result) {
    {
      const std::lock_guard lock(mutex_);
      result_ = std::move(result);
    }
    is_done_.notify_one();
    thread_.joinable() ? thread_.join() : exchange();
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    return std::move(results_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kShortestPeriod{20}, kLongestPeriod{10'000};

  void exchange() noexcept {
    try {
      while (!all_are_done()) {
      }
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  bool all_are_done() {
    results_ = group_.all_gather_strings(state_of_this_rank());
    note_answer();
    bool all = true;
    for (size_t rank = 0; rank < results_.size(); ++rank) {
      if (!results_[rank].starts_with(kWorking)) continue;
      all = false;
      const std::chrono::milliseconds idle(std::stoll(results_[rank].substr(1)));
      if (idle < group_.timeout()) continue;
      throw_idle(group_.ranks()[rank], std::chrono::round<std::chrono::seconds>(idle));
    }
    return all;
  }

  [[noreturn]] void throw_idle(int rank, std::chrono::seconds idle) {
    try {
      C10_THROW_ERROR(DistBackendError,
                      c10::str("rank ", rank, " has done nothing for ", idle.count(), " s", text_of_place(),
                               ": is its disk or network file system gone, or very slow? (Where it needs longer, raise "
                               "--distributed-timeout-minutes)"));
    } catch (...) {
      group_.fail(std::current_exception());  // no further wait for that rank
      throw;
    }
  }

  std::string state_of_this_rank() {
    std::unique_lock lock(mutex_);
    if (is_done_.wait_for(lock, period_, [this] { return result_.has_value(); })) return *result_;
    const auto now = Clock::now();
    if (const int64_t parts = parts_done(); parts != parts_seen_) {
      parts_seen_ = parts;
      last_progress_ = now;
    }
    return kWorking + std::to_string(std::chrono::floor<std::chrono::milliseconds>(now - last_progress_).count());
  }

  ProcessGroup& group_;
  const std::chrono::milliseconds period_;
  int64_t parts_seen_ = parts_done();
  Clock::time_point last_progress_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable is_done_;
  std::optional<std::string> result_;
  std::vector<std::string> results_;
  std::exception_ptr failure_;
  std::thread thread_;
};

std::vector<std::string> gather(const ProcessGroupPtr& group, const std::function<std::string()>& work) {
  if (!has_host_backend(group)) return group->all_gather_strings(run(work));  // a GPU group has one thread
  WorkingExchange exchange(*group);
  return exchange.finish(run(work));
}

}  // namespace

std::vector<std::string> gather_or_throw(const ProcessGroupPtr& group, const std::function<std::string()>& work) {
  if (size_in(group) == 1) return {work()};
  auto results = gather(group, work);
  std::string failure;
  char outcome = kDone;
  size_t failed = 0;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    auto& result = results[rank];
    const char sent = result.empty() ? kFailed : result[0];
    result.erase(0, 1);
    if (sent == kDone || failed++ > 0) continue;
    outcome = sent;
    failure = "rank " + std::to_string(group->ranks()[rank]) + ": " + result;
  }
  if (failed > 1) failure += " (and " + std::to_string(failed - 1) + " other ranks)";
  TORCH_CHECK_VALUE(outcome != kValueError, failure);
  TORCH_CHECK_NOT_IMPLEMENTED(outcome != kNotImplemented, failure);
  if (outcome == kPeerLost) C10_THROW_ERROR(DistBackendError, failure);
  TORCH_CHECK(failed == 0, failure);
  return results;
}

void all_or_throw(const ProcessGroupPtr& group, const std::function<void()>& work) {
  gather_or_throw(group, [&work] {
    work();
    return std::string();
  });
}

void all_or_rethrow(const ProcessGroupPtr& group, const std::function<void()>& work) {
  std::exception_ptr mine;
  try {
    all_or_throw(group, [&] {
      try {
        work();
      } catch (...) {
        mine = std::current_exception();
        throw;
      }
    });
  } catch (...) {
    if (mine != nullptr) std::rethrow_exception(mine);
    throw;
  }
}

void meet_after_failure(const ProcessGroupPtr& group) noexcept {
  try {
    all_or_throw(group, [] { throw; });  // the exception being handled
  } catch (...) {                        // the handler rethrows it
  }
}

}  // namespace megashard
