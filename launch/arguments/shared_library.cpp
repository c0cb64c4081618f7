#include "launch/arguments/shared_library.h"

#include <elf.h>
#include <link.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

namespace megashard {
namespace {

using Header = ElfW(Ehdr);
using Segment = ElfW(Phdr);

template <class T>
std::optional<T> read_at(std::ifstream& file, uint64_t offset) {
  T value;
  file.seekg(static_cast<std::streamoff>(offset));
  if (!file.read(reinterpret_cast<char*>(&value), sizeof(value))) return std::nullopt;
  return value;
}

/// ELF header of the running program.
Header own_header() {
  std::ifstream self("/proc/self/exe", std::ios::binary);
  return read_at<Header>(self, 0).value_or(Header{});
}

}  // namespace

std::string why_no_shared_library(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::string("it cannot be read (") + std::strerror(errno) + ")";
  const uint64_t size = std::filesystem::file_size(path);
  const std::string has = "it has " + std::to_string(size) + " bytes, ";
  const std::string cut = "so it is cut off; copy or build it again";
  if (size == 0) return "it is empty; build it again";
  char magic[SELFMAG] = {};
  file.read(magic, sizeof(magic));
  if (std::memcmp(magic, ELFMAG, SELFMAG) != 0) return "it is no shared library (it does not begin as one)";
  const auto header = read_at<Header>(file, 0);
  if (!header) return has + "fewer than the head of a library, " + cut;
  const Header own = own_header();
  if (std::memcmp(header->e_ident, own.e_ident, EI_DATA + 1) != 0 || header->e_machine != own.e_machine)
    return "it was built for another processor; build it on a machine like this one";
  if (header->e_type == ET_REL) return "it is an object file; link it with -shared";
  if (header->e_type != ET_DYN) return "it is a program, not a shared library; link it with -shared";
  for (int i = 0; i < header->e_phnum; ++i) {
    const auto segment = read_at<Segment>(file, header->e_phoff + uint64_t(i) * header->e_phentsize);
    const bool inside = segment && segment->p_offset <= size && segment->p_filesz <= size - segment->p_offset;
    if (!inside) return has + "fewer than its own head says, " + cut;
  }
  return "";
}

}  // namespace megashard
