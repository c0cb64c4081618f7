#include "checkpoint/steps/agreement.h"

#include <c10/util/Exception.h>

#include <exception>

namespace megashard {
namespace {

constexpr char kFailed = '!';
constexpr char kDone = '.';

std::string run(const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const c10::Error& error) {
    return kFailed + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return kFailed + std::string(error.what());
  }
}

}  // namespace

std::vector<std::string> gather_or_throw(const ProcessGroupPtr& group,
                                         const std::function<std::string()>& work) {
  if (group == nullptr || group->size() == 1) return {work()};
  auto results = group->all_gather_strings(run(work));
  std::string failures;
  size_t failed = 0;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    if (results[rank].empty() || results[rank][0] != kDone) {
      const auto message = results[rank].empty() ? std::string() : results[rank].substr(1);
      if (failed++ == 0) failures = "rank " + std::to_string(group->ranks()[rank]) + ": " + message;
    } else {
      results[rank].erase(0, 1);
    }
  }
  TORCH_CHECK(failed == 0, failures, failed > 1 ? " (and " + std::to_string(failed - 1) + " other ranks)" : "");
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
    all_or_throw(group, [] { throw; });  // what is being handled
  } catch (...) {  // the handler throws it
  }
}

}  // namespace megashard
