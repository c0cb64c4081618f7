#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace megashard {

/// Wraps a store so that every call ends: with its answer, or with an error a second after the deadline. A TCPStore
/// waits as long as the system keeps the connection: a quarter of an hour after the network is gone. Include in .cpp
/// files only.
class DeadlineStore final : public c10d::Store {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Keys = std::vector<std::string>;
  using Value = std::vector<uint8_t>;

  /// `left` returns the time allowed for a call that begins now; it must own everything it uses.
  DeadlineStore(c10::intrusive_ptr<c10d::Store> inner, std::function<Milliseconds()> left);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const Value& value) override;
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override;
  Value get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const Keys& keys) override;
  int64_t getNumKeys() override;
  void wait(const Keys& keys) override;
  void wait(const Keys& keys, const Milliseconds& timeout) override;
  const Milliseconds& getTimeout() const noexcept override;
  void setTimeout(const Milliseconds& timeout) override;
  void append(const std::string& key, const Value& value) override;
  std::vector<Value> multiGet(const Keys& keys) override;
  void multiSet(const Keys& keys, const std::vector<Value>& values) override;
  bool hasExtendedApi() const override;

 private:
  template <class Call>
  auto ask(Call call) const;

  c10::intrusive_ptr<c10d::Store> inner_;
  std::function<Milliseconds()> left_;
};

}  // namespace megashard
