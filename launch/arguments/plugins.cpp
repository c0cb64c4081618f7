#include "launch/arguments/plugins.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>

#include "framework/data/data_formats.h"
#include "framework/diagnostics.h"
#include "framework/objectives/objectives.h"
#include "framework/training/listener.h"

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

const PluginFlag kCallbackPlugin{.flag = "--callback-plugin",
                                 .what = "callback",
                                 .registry = "RegisterCallback",
                                 .known = [] { return callbacks().size(); },
                                 .ignored = ignored_callbacks};
const PluginFlag kLossPlugin{.flag = "--loss-plugin",
                             .what = "objective",
                             .registry = "RegisterObjective",
                             .known = [] { return objectives().size(); },
                             .ignored = ignored_objectives};

namespace {

/// The flag of a word, as in the table: "--callback_plugin=x" -> "--callback-plugin".
std::string flag_of(const std::string& word) {
  std::string flag = word.substr(0, word.find('='));
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

}  // namespace

void load_plugins(const std::vector<std::string>& words) {
  const PluginFlag* kind = nullptr;  // of the words that follow
  const auto load = [&kind](const std::string& path) {
    if (kind != nullptr && !path.empty()) load_plugin(*kind, path);  // the parser refuses an empty value
  };
  for (const std::string& word : words) {
    if (!word.starts_with("--")) {
      load(word);
      continue;
    }
    const std::string flag = flag_of(word);
    kind = flag == kCallbackPlugin.flag ? &kCallbackPlugin : flag == kLossPlugin.flag ? &kLossPlugin : nullptr;
    if (const auto equals = word.find('='); equals != std::string::npos) load(word.substr(equals + 1));
  }
}

void load_plugin(const PluginFlag& kind, const std::string& path) {
  static std::set<std::string> loaded;
  const std::string flag = std::string(kind.flag) + " " + path;
  if (loaded.contains(flag)) return;
  if (!std::filesystem::is_regular_file(path))
    throw UsageError(flag + " is no file; give the path of a shared library.");
  if (const auto why = why_no_shared_library(path); !why.empty())
    throw UsageError(flag + " cannot be loaded: " + why + ".");
  const size_t known = kind.known() + data_formats().size();
  const int64_t ignored = kind.ignored() + ignored_data_formats();
  // Absolute, because dlopen searches system folders for names without a slash.
  if (dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    throw UsageError(flag + " cannot be loaded: " + dlerror() +
                     "; it must be a shared library that was built against this megashard and its LibTorch.");
  }
  if (kind.ignored() + ignored_data_formats() > ignored) {
    throw UsageError(flag +
                     " was built against another megashard or LibTorch; build it again against the installed headers.");
  }
  if (kind.known() + data_formats().size() == known)
    throw UsageError(flag + " registers no " + kind.what + ": it has no " + kind.registry + " (docs/extending.md).");
  loaded.insert(flag);
}

}  // namespace megashard
