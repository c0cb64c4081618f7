#include "parallel/collectives/deadline_store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <functional>
#include <optional>
#include <system_error>
#include <type_traits>
#include <utility>

#include "parallel/collectives/start_wait.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Value = DeadlineStore::Value;

// Extra time: a store that answers ends its own waits at the deadline, and its error names the key.
constexpr DeadlineStore::Milliseconds kForTheAnswer{1000};

/// " at 10.0.0.1:29500"; empty if unknown.
std::string place_of(StorePtr store) {
  while (const auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store))
    store = prefixed->getUnderlyingStore();
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(store.get());
  return tcp == nullptr ? "" : " at " + tcp->getHost() + ":" + std::to_string(tcp->getPort());
}

}  // namespace

DeadlineStore::DeadlineStore(StorePtr inner, std::function<Milliseconds()> left)
    : inner_(std::move(inner)), left_(std::move(left)) {}

/// Returns the result of `call` on the inner store. `call` may be abandoned, so it owns its arguments.
template <class Call>
auto DeadlineStore::ask(Call call) const {
  using Answer = std::invoke_result_t<Call, c10d::Store&>;
  constexpr bool kSilent = std::is_void_v<Answer>;
  using Kept = std::conditional_t<kSilent, bool, Answer>;
  const StartDeadline deadline(left_() + kForTheAnswer);
  const std::function<Kept()> once = [inner = inner_, call = std::move(call)]() -> Kept {
    if constexpr (kSilent) {
      call(*inner);
      return true;
    } else {
      return call(*inner);
    }
  };
  std::optional<Kept> answer;
  try {
    answer = before<Kept>(deadline, once);
  } catch (const std::system_error& error) {
    if (!is_short_of_memory(error)) throw;
    answer = once();  // who may start no thread can still tell the others
  }
  if (!answer) {
    C10_THROW_ERROR(DistStoreError, c10::str("the store", place_of(inner_), " gave no answer for ", deadline.waited(),
                                             ": check the network to it, and that its process runs"));
  }
  if constexpr (!kSilent) return std::move(*answer);
}

StorePtr DeadlineStore::clone() {
  StorePtr copy = ask([](c10d::Store& inner) { return inner.clone(); });
  return c10::make_intrusive<DeadlineStore>(std::move(copy), left_);
}

void DeadlineStore::set(const std::string& key, const Value& value) {
  ask([key, value](c10d::Store& inner) { inner.set(key, value); });
}

Value DeadlineStore::compareSet(const std::string& key, const Value& expected, const Value& desired) {
  return ask([key, expected, desired](c10d::Store& inner) { return inner.compareSet(key, expected, desired); });
}

Value DeadlineStore::get(const std::string& key) {
  return ask([key](c10d::Store& inner) { return inner.get(key); });
}

int64_t DeadlineStore::add(const std::string& key, int64_t value) {
  return ask([key, value](c10d::Store& inner) { return inner.add(key, value); });
}

bool DeadlineStore::deleteKey(const std::string& key) {
  return ask([key](c10d::Store& inner) { return inner.deleteKey(key); });
}

bool DeadlineStore::check(const Keys& keys) {
  return ask([keys](c10d::Store& inner) { return inner.check(keys); });
}

int64_t DeadlineStore::getNumKeys() {
  return ask([](c10d::Store& inner) { return inner.getNumKeys(); });
}

void DeadlineStore::wait(const Keys& keys) {
  ask([keys](c10d::Store& inner) { inner.wait(keys); });
}

void DeadlineStore::wait(const Keys& keys, const Milliseconds& timeout) {
  ask([keys, timeout](c10d::Store& inner) { inner.wait(keys, timeout); });
}

const DeadlineStore::Milliseconds& DeadlineStore::getTimeout() const noexcept { return inner_->getTimeout(); }

void DeadlineStore::setTimeout(const Milliseconds& timeout) { inner_->setTimeout(timeout); }

void DeadlineStore::append(const std::string& key, const Value& value) {
  ask([key, value](c10d::Store& inner) { inner.append(key, value); });
}

std::vector<Value> DeadlineStore::multiGet(const Keys& keys) {
  return ask([keys](c10d::Store& inner) { return inner.multiGet(keys); });
}

void DeadlineStore::multiSet(const Keys& keys, const std::vector<Value>& values) {
  ask([keys, values](c10d::Store& inner) { inner.multiSet(keys, values); });
}

bool DeadlineStore::hasExtendedApi() const { return inner_->hasExtendedApi(); }

}  // namespace megashard
