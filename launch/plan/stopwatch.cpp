#include "launch/plan/stopwatch.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "parallel/device/streams.h"

namespace megashard {

double Stopwatch::seconds_of(int calls, const std::function<void()>& work) const {
  work();
  const auto wait = [this] {
    if (!device_.is_cpu()) StreamEvent::record(current_stream(device_)).synchronize();
  };
  wait();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) work();
  wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls;
}

double Stopwatch::seconds_of(const std::function<void()>& work) const {
  constexpr double kRound = 0.02;
  constexpr int kMostCalls = 10'000;
  const double once = seconds_of(1, work);
  const int calls = std::clamp(static_cast<int>(kRound / once), 1, kMostCalls);
  std::array<double, 5> rounds{};
  for (double& each : rounds) each = seconds_of(calls, work);
  std::ranges::nth_element(rounds, rounds.begin() + 2);
  return rounds[2];
}

}  // namespace megashard
