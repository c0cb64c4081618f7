#include "launch/train/load_model_plugin.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>

#include "framework/diagnostics.h"
#include "framework/modules/model_registry.h"
#include "launch/arguments/plugins.h"

namespace megashard {
namespace {

void check_versions(const std::string& flag, const ModelPlugin* plugin) {
  const ModelPlugin own;
  const std::string remedy = "; build it again against the installed headers.";
  if (plugin == nullptr || plugin->version != own.version) {
    throw UsageError(flag + " was built against another megashard: its interface is " +
                     std::to_string(plugin == nullptr ? 0 : plugin->version) + ", this program's " +
                     std::to_string(own.version) + remedy);
  }
  if (std::string(plugin->libtorch) != own.libtorch) {
    throw UsageError(flag + " was built against LibTorch " + plugin->libtorch + ", this program runs on " +
                     own.libtorch + remedy);
  }
  const bool same = plugin->batch_bytes == own.batch_bytes && plugin->model_bytes == own.model_bytes &&
                    plugin->mixin_bytes == own.mixin_bytes;
  if (!same) throw UsageError(flag + " was built against another megashard" + remedy);
  if (plugin->add_models == nullptr) throw UsageError(flag + " registers no model: its ModelPlugin has no add_models.");
}

}  // namespace

void load_model_plugin(const std::string& path, ModelRegistry& registry) {
  const std::string flag = "--model-plugin " + path;
  if (!std::filesystem::is_regular_file(path))
    throw UsageError(flag + " is no file; give the path of a shared library.");
  if (const auto why = why_no_shared_library(path); !why.empty())
    throw UsageError(flag + " cannot be loaded: " + why + ".");
  // Absolute, because dlopen searches system folders for names without a slash.
  void* library = dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw UsageError(flag + " cannot be loaded: " + why +
                     "; it must be a shared library that was built against this megashard and its "
                     "LibTorch.");
  }
  void* symbol = dlsym(library, kModelPluginSymbol);
  if (symbol == nullptr) {
    throw UsageError(flag + " is no plugin: it does not export " + kModelPluginSymbol + "(); see docs/user_models.md.");
  }
  try {
    const auto* plugin = reinterpret_cast<const ModelPlugin* (*)()>(symbol)();
    check_versions(flag, plugin);
    plugin->add_models(registry);
  } catch (const UsageError&) {
    throw;
  } catch (const c10::Error& error) {
    throw UsageError(flag + " failed to register its models: " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw UsageError(flag + " failed to register its models: " + error.what());
  }
}

}  // namespace megashard
