#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

namespace megashard {

/// An open file descriptor, which the destructor closes.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return number_; }

 private:
  int number_;
};

/// A Unix socket with one client, which stays connected. In both directions a message is kMessageMark, the number of
/// its bytes (64 bits, little endian), and the bytes. Errors are about the client, and say so.
class MessageSocket {
 public:
  /// Listens at `path`, for this user alone; the destructor removes the file. The socket of a process that is gone is
  /// replaced. `timeout`: how long a client may take to connect, to send a request and to take a reply. Throws
  /// UsageError where no socket can be.
  MessageSocket(std::string path, std::chrono::minutes timeout);
  ~MessageSocket();
  MessageSocket(const MessageSocket&) = delete;
  MessageSocket& operator=(const MessageSocket&) = delete;

  const std::string& path() const { return path_; }
  /// Reads what the client has sent, and waits for more as long as `period`. Returns the next message once it is whole.
  /// Blocks the host so long.
  std::optional<std::string> receive(std::chrono::milliseconds period);
  /// Blocks the host until the client's side has taken it.
  void send(const std::string& bytes);

 private:
  using Time = std::chrono::steady_clock::time_point;

  static bool is_ready(const Descriptor& descriptor, short events, Time until);
  void check_deadline(const char* what) const;
  void restart_deadline() { deadline_ = std::chrono::steady_clock::now() + timeout_; }
  /// How many bytes the message has, with those before it; as long as its length is not there, those before it.
  size_t expected() const;

  std::string path_;
  std::chrono::minutes timeout_;
  Time deadline_;
  std::optional<Descriptor> listener_, client_;
  std::string arrived_;  // bytes of the next message
};

inline constexpr const char* kMessageMark = "megashd1";  ///< 8 bytes, the last one is the protocol's version

}  // namespace megashard
