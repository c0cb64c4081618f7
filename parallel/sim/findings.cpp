#include "parallel/sim/findings.h"

#include <c10/util/Backtrace.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace megashard::sim {
namespace {

constexpr size_t kMax = 200;  // later ones are dropped

struct Findings {
  std::mutex mutex;
  std::vector<std::string> messages;
};
Findings& findings() {
  static auto* each = new Findings;
  return *each;
}

/// Name of the function at an address, without arguments; empty if unknown.
std::string function_at(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_sname == nullptr) return "";
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status),
                                                         &std::free);
  std::string name = status == 0 ? text.get() : info.dli_sname;
  const auto arguments = name.find('(', name.starts_with("(anonymous") ? 1 : 0);
  if (const auto anonymous = name.find("(anonymous namespace)"); anonymous != name.npos) {
    const auto end = name.find('(', anonymous + 21);
    return end == name.npos ? name : name.substr(0, end);
  }
  return arguments == name.npos ? name : name.substr(0, arguments);
}

template <class Visit>
void over_frames(const Visit& visit) {
  std::array<void*, 96> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  static std::mutex mutex;
  static auto* names = new std::unordered_map<void*, std::string>;
  for (int i = 2; i < count; ++i) {
    const std::lock_guard lock(mutex);
    auto [at, added] = names->try_emplace(frames[static_cast<size_t>(i)]);
    if (added) at->second = function_at(at->first);
    if (!visit(at->second)) return;
  }
}

bool ours(const std::string& function) {
  return function.find("megashard::") != function.npos && function.find("megashard::sim::") == function.npos;
}

}  // namespace

void found(const std::string& message) {
  Findings& all = findings();
  const std::lock_guard lock(all.mutex);
  if (all.messages.size() < kMax && std::find(all.messages.begin(), all.messages.end(), message) == all.messages.end())
    all.messages.push_back(message);
}

std::vector<std::string> take_findings() {
  const std::lock_guard lock(findings().mutex);
  return std::exchange(findings().messages, {});
}

std::string call_stack() {
  std::string stack;
  over_frames([&](const std::string& function) {
    if (!function.empty()) stack += "\n    " + function;
    return true;
  });
  return stack;
}

std::string calling_place() {
  std::string place;
  over_frames([&](const std::string& function) {
    if (!ours(function)) return true;
    place = function;
    return false;
  });
  return place.empty() ? "outside megashard" : place;
}

}  // namespace megashard::sim
