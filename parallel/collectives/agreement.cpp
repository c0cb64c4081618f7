#include "parallel/collectives/agreement.h"

#include <c10/util/Exception.h>

namespace megashard {
namespace {

// The first character of what a rank sends; its result follows, or its error message.
constexpr char kDone = '.';
constexpr char kFailed = '!';
constexpr char kValueError = 'v';
constexpr char kNotImplemented = 'n';
constexpr char kPeerLost = 'd';

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

}  // namespace

std::vector<std::string> gather_or_throw(const ProcessGroupPtr& group, const std::function<std::string()>& work) {
  if (size_in(group) == 1) return {work()};
  auto results = group->all_gather_strings(run(work));
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
    all_or_throw(group, [] { throw; });  // what is being handled
  } catch (...) {                        // the handler throws it
  }
}

std::string error_text(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch == nullptr ? error.what() : from_torch->what_without_backtrace();
}

}  // namespace megashard
