#include "parallel/collectives/listening_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

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

}  // namespace megashard
