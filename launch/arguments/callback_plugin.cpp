#include "launch/arguments/callback_plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "framework/diagnostics.h"
#include "framework/training/listener.h"
#include "launch/arguments/shared_library.h"

namespace megashard {
namespace {

constexpr std::string_view kFlag = "--callback-plugin";

/// The flag of a word, as in the table: "--callback_plugin=x" -> "--callback-plugin".
std::string flag_of(const std::string& word) {
  std::string flag = word.substr(0, word.find('='));
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

}  // namespace

void load_callback_plugins(const std::vector<std::string>& words) {
  const auto load = [](const std::string& path) {
    if (!path.empty()) load_callback_plugin(path);  // the parser refuses an empty value
  };
  bool is_value = false;
  for (const std::string& word : words) {
    if (!word.starts_with("--")) {
      if (is_value) load(word);
      continue;
    }
    is_value = flag_of(word) == kFlag;
    const auto equals = word.find('=');
    if (is_value && equals != std::string::npos) load(word.substr(equals + 1));
  }
}

void load_callback_plugin(const std::string& path) {
  static std::set<std::string> loaded;
  if (loaded.contains(path)) return;
  const std::string flag = std::string(kFlag) + " " + path;
  if (!std::filesystem::is_regular_file(path))
    throw UsageError(flag + " is no file; give the path of a shared library.");
  if (const auto why = why_no_shared_library(path); !why.empty())
    throw UsageError(flag + " cannot be loaded: " + why + ".");
  const size_t known = callbacks().size();
  const int64_t ignored = ignored_callbacks();
  // Absolute, because dlopen searches system folders for names without a slash.
  if (dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    throw UsageError(flag + " cannot be loaded: " + dlerror() +
                     "; it must be a shared library that was built against this megashard and its LibTorch.");
  }
  if (ignored_callbacks() > ignored) {
    throw UsageError(flag +
                     " was built against another megashard or LibTorch; build it again against the installed headers.");
  }
  if (callbacks().size() == known)
    throw UsageError(flag + " registers no callback: it has no RegisterCallback (docs/extending.md).");
  loaded.insert(path);
}

}  // namespace megashard
