#include "parallel/collectives/probe_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

namespace megashard {
namespace {

using AddressInfo = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

AddressInfo numeric_address(const std::string& host, int port) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found) != 0) found = nullptr;
  return {found, [](addrinfo* list) { ::freeaddrinfo(list); }};
}

}  // namespace

ListeningSocket listen_at(const std::string& host, int port) {
  const auto address = numeric_address(host, port);
  if (address == nullptr) return {.error = EADDRNOTAVAIL};
  const int fd = ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return {.error = errno};
  const int reuse = 1;  // reuses the port of a run that has just ended
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
  if (::bind(fd, address->ai_addr, address->ai_addrlen) == 0 && ::listen(fd, SOMAXCONN) == 0) return {.descriptor = fd};
  const int error = errno;
  ::close(fd);
  return {.error = error};
}

bool is_loopback_address(const std::string& host) {
  const auto address = numeric_address(host, 0);
  if (address == nullptr) return false;
  if (address->ai_family == AF_INET) {
    const auto* narrow = reinterpret_cast<const sockaddr_in*>(address->ai_addr);
    return ntohl(narrow->sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address->ai_addr)->sin6_addr);
}

namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kLongestConnect{5000};

struct NumericAddress {
  sockaddr_storage socket{};
  socklen_t size = 0;
  std::string text;
};

struct Lookup {
  std::string failure;
  std::vector<NumericAddress> addresses;
};

/// "10.0.0.1"; empty if it has no text form.
std::string text_of(const NumericAddress& address) {
  char text[NI_MAXHOST];
  const auto* socket = reinterpret_cast<const sockaddr*>(&address.socket);
  const bool known = ::getnameinfo(socket, address.size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0;
  return known ? text : "";
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
  }
  const in6_addr& wide = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&wide) || (IN6_IS_ADDR_V4MAPPED(&wide) && wide.s6_addr[12] == 127);
}

Lookup look_up(const std::string& host, int port) {
  addrinfo wanted{}, *first = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  Lookup result;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &first);
  if (error != 0) {
    result.failure = error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error);
    return result;
  }
  for (const addrinfo* each = first; each != nullptr; each = each->ai_next) {
    NumericAddress address;
    std::memcpy(&address.socket, each->ai_addr, each->ai_addrlen);
    address.size = each->ai_addrlen;
    address.text = text_of(address);
    if (!address.text.empty()) result.addresses.push_back(std::move(address));
  }
  ::freeaddrinfo(first);
  return result;
}

/// Returns 0, or the errno of the failed connection.
int connect_to(const NumericAddress& address, Milliseconds timeout) {
  const int fd = ::socket(address.socket.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  int error = 0;
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address.socket), address.size) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      pollfd wait{fd, POLLOUT, 0};
      socklen_t size = sizeof(error);
      const bool ready = ::poll(&wait, 1, static_cast<int>(timeout.count())) == 1;
      if (!ready || ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = ETIMEDOUT;
    }
  }
  ::close(fd);
  return error;
}

/// AddressProbe::own. A connected datagram socket knows it without sending anything.
std::string own_address(const NumericAddress& there) {
  const int fd = ::socket(there.socket.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  NumericAddress own;
  own.size = sizeof(own.socket);
  const bool known = ::connect(fd, reinterpret_cast<const sockaddr*>(&there.socket), there.size) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&own.socket), &own.size) == 0;
  ::close(fd);
  return known && !is_loopback(own.socket) ? text_of(own) : "";
}

}  // namespace

AddressProbe probe_address(const std::string& host, int port, bool connects, const StartDeadline& deadline) {
  const auto found = before<Lookup>(deadline, [host, port] { return look_up(host, port); });
  if (!found) return {};
  if (!found->failure.empty()) {
    return {.why = "the name " + host + " does not resolve (" + found->failure + ")", .remedy = "check the name"};
  }
  int error = 0;
  for (const NumericAddress& address : found->addresses) {
    if (connects) error = connect_to(address, std::min(deadline.left(), kLongestConnect));
    if (error == 0) return {.reached = address.text, .own = own_address(address)};
  }
  if (error == ECONNREFUSED)
    return {.why = "nobody listens there", .remedy = "start rank 0, and check address and port"};
  if (error == ETIMEDOUT)
    return {.why = "nothing there answers", .remedy = "start rank 0, and check address, port and firewall"};
  return {.why = std::strerror(error), .remedy = "check address and network"};
}

}  // namespace megashard
