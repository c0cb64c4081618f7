#include "parallel/collectives/start_wait.h"

#include <algorithm>

namespace megashard {

using Milliseconds = std::chrono::milliseconds;

namespace {

std::string seconds_since(std::chrono::steady_clock::time_point start) {
  const auto waited = std::chrono::steady_clock::now() - start;
  return std::to_string(std::chrono::round<std::chrono::seconds>(waited).count()) + " s";
}

}  // namespace

Milliseconds StartDeadline::left() const {
  const auto end = started_ + timeout_;
  return std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(end - std::chrono::steady_clock::now()));
}

Milliseconds StartDeadline::pause(int ranks) const {
  const auto waited = std::chrono::floor<Milliseconds>(std::chrono::steady_clock::now() - started_);
  const Milliseconds least(std::max(2, ranks / 16));
  return std::min({std::max(waited / 16, least), kLongestPause, left()});
}

std::string StartDeadline::waited() const { return seconds_since(started_); }

WaitTeller::WaitTeller(std::function<void(const std::string&)> notice, Milliseconds first)
    : notice_(std::move(notice)) {
  if (notice_) thread_ = std::thread([this, first] { run(first); });
}

WaitTeller::~WaitTeller() {
  if (!tells()) return;
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  ended_.notify_all();
  thread_.join();
}

void WaitTeller::wait_for(const std::string& whom, const std::string& why) {
  const std::lock_guard lock(mutex_);
  whom_ = whom;
  why_ = why;
}

void WaitTeller::run(Milliseconds first) {
  const auto started = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  for (Milliseconds due = first;; due *= 2) {
    if (ended_.wait_until(lock, started + due, [this] { return over_; })) return;
    if (whom_.empty()) continue;
    notice_("Waiting for " + whom_ + " (" + seconds_since(started) + ")" + (why_.empty() ? "" : ": " + why_));
  }
}

}  // namespace megashard
