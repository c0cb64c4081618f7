#pragma once

#include <string>

namespace megashard {

/// Owns a file descriptor; -1 if none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { reset(); }
  void reset();
  int get() const { return fd_; }

 private:
  int fd_;
};

/// Closed on exec; reads do not block.
struct Pipe {
  Descriptor read, write;
};

Pipe make_pipe();

/// Throws std::runtime_error with "launch: ", `what`, and the message of errno.
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace megashard
