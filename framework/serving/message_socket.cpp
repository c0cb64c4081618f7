#include "framework/serving/message_socket.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <utility>

#include "checkpoint/files/file_io.h"
#include "framework/diagnostics.h"
#include "parallel/collectives/noted_progress.h"

namespace megashard {
namespace {

constexpr size_t kMarkBytes = 8, kHeadBytes = 16, kReadBytes = size_t{1} << 20;
constexpr uint64_t kMostMessageBytes = uint64_t{1} << 32;
constexpr std::chrono::milliseconds kLookAgain{1000};

[[noreturn]] void refuse_path(const std::string& path, const std::string& reason) {
  throw UsageError("serve: no socket can be at " + path + ": " + reason);
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    refuse_path(path, "its path has " + std::to_string(path.size()) + " bytes, and a socket's has " +
                          std::to_string(sizeof address.sun_path - 1) + " at most; give a shorter one");
  }
  std::copy(path.begin(), path.end(), address.sun_path);
  return address;
}

/// Removes the socket of a process that is gone.
void remove_stale(const std::string& path, const sockaddr* address) {
  if (!std::filesystem::exists(std::filesystem::symlink_status(path))) return;
  if (!std::filesystem::is_socket(std::filesystem::symlink_status(path)))
    refuse_path(path, "there is a file of another kind; give another path");
  const Descriptor trial(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(trial.get(), address, sizeof(sockaddr_un)) == 0)
    refuse_path(path, "another process listens there; stop it, or give another path");
  std::filesystem::remove(path);
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

MessageSocket::MessageSocket(std::string path, std::chrono::minutes timeout)
    : path_(std::move(path)), timeout_(timeout) {
  restart_deadline();
  const sockaddr_un address = address_of(path_);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  const auto folder = std::filesystem::absolute(path_).parent_path();
  if (!std::filesystem::is_directory(folder))
    refuse_path(path_, folder.string() + " is no folder; make it, or give another path");
  remove_stale(path_, generic);
  listener_.emplace(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const mode_t before = umask(S_IRWXG | S_IRWXO | S_IXUSR);
  const bool is_bound = listener_->get() >= 0 && bind(listener_->get(), generic, sizeof address) == 0;
  const std::string reason = errno_text();
  umask(before);
  if (!is_bound) refuse_path(path_, reason);
  if (listen(listener_->get(), /*backlog=*/1) != 0) refuse_path(path_, errno_text());
}

MessageSocket::~MessageSocket() {
  std::error_code ignored;
  if (listener_) std::filesystem::remove(path_, ignored);
}

bool MessageSocket::is_ready(const Descriptor& descriptor, short events, Time until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  pollfd entry{.fd = descriptor.get(), .events = events, .revents = 0};
  return poll(&entry, 1, static_cast<int>(std::max<int64_t>(0, left.count()))) > 0;
}

void MessageSocket::check_deadline(const char* what) const {
  TORCH_CHECK(std::chrono::steady_clock::now() < deadline_, what, " at ", path_, " within ", timeout_.count(),
              " min (--rollout-timeout-minutes): does the client still run?");
}

size_t MessageSocket::expected() const {
  if (arrived_.size() < kHeadBytes) return kHeadBytes;
  TORCH_CHECK(arrived_.starts_with(kMessageMark), "what a client sends to ", path_,
              " is no message of this protocol (docs/serving_losses.md): does it have another version?");
  uint64_t length = 0;
  for (size_t i = kHeadBytes; i-- > kMarkBytes;) length = length << 8 | static_cast<unsigned char>(arrived_[i]);
  TORCH_CHECK(length <= kMostMessageBytes, "a client sends a message of ", length, " bytes to ", path_,
              "; the limit is 4 GiB");
  return kHeadBytes + length;
}

std::optional<std::string> MessageSocket::receive(std::chrono::milliseconds period) {
  const Time until = std::chrono::steady_clock::now() + period;
  while (!client_) {
    if (!is_ready(*listener_, POLLIN, until)) {
      check_deadline("no client has connected");
      return std::nullopt;
    }
    const int accepted = accept4(listener_->get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted >= 0) client_.emplace(accepted);
  }
  for (size_t whole = expected(); arrived_.size() < whole; whole = expected()) {
    if (!is_ready(*client_, POLLIN, until)) {
      check_deadline("no whole request has arrived");
      return std::nullopt;
    }
    const size_t begin = arrived_.size();
    arrived_.resize(begin + std::min(kReadBytes, whole - begin));
    const ssize_t got = recv(client_->get(), arrived_.data() + begin, arrived_.size() - begin, 0);
    const bool goes_on = got > 0 || (got < 0 && (errno == EINTR || errno == EAGAIN));
    TORCH_CHECK(goes_on, "the client of ", path_, " is gone", got < 0 ? ": " + errno_text() : std::string(),
                begin > 0 ? ", in the middle of a message" : "",
                "; one that needs the server no more sends the command \"stop\"");
    arrived_.resize(begin + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  }
  return std::exchange(arrived_, {}).substr(kHeadBytes);
}

void MessageSocket::send(const std::string& bytes) {
  restart_deadline();
  std::string whole(kMessageMark);
  for (size_t i = 0; i < kHeadBytes - kMarkBytes; ++i) whole += static_cast<char>(bytes.size() >> (8 * i));
  whole += bytes;
  for (size_t done = 0; done < whole.size();) {
    if (!is_ready(*client_, POLLOUT, std::chrono::steady_clock::now() + kLookAgain)) {
      check_deadline("no reply was taken");
      note_progress();
      continue;
    }
    const ssize_t sent = ::send(client_->get(), whole.data() + done, whole.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    const bool goes_on = sent >= 0 || errno == EINTR || errno == EAGAIN;
    TORCH_CHECK(goes_on, "the client of ", path_, " is gone and takes no reply: ", errno_text());
    done += static_cast<size_t>(std::max<ssize_t>(sent, 0));
  }
  restart_deadline();
}

}  // namespace megashard
