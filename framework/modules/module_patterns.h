#pragma once

#include <torch/nn/module.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "framework/modules/fsdp2_config.h"

namespace megashard {

/// A submodule and its path from the model ("model.layers.3"). The model owns it.
struct NamedModule {
  std::string path;
  torch::nn::Module* module = nullptr;
};

/// What one pattern matched, in its order.
struct PatternMatch {
  std::string pattern;
  std::vector<std::string> paths;
};

struct ModuleSelection {
  std::vector<NamedModule> modules;   ///< of all patterns in order, each module once
  std::vector<PatternMatch> matches;  ///< by pattern, for the report
};

/// A module's path against a pattern of MindSpeed's native route, which may stand for several:
/// {*} is a number, {0-3,7} one of these, * any text, ? one character.
bool matches_native_pattern(std::string_view pattern, std::string_view path);

/// The same selection by native patterns, in the order of the model. One that matches nothing is an
/// error, as there.
ModuleSelection select_modules_natively(const torch::nn::Module& model, const std::vector<std::string>& patterns,
                                        const std::string& key);

/// Finds the modules that path patterns of the FSDP2 file name. A pattern is a dotted path from the
/// model's children; its words may be {*} (every index) or {0-20,25} (inclusive ranges, sorted,
/// once): model.layers.{*}.mlp.experts.{*}. A path that does not exist and ends in a capital name
/// stands for the modules of that class (package.module.ClassName). `key` is the file's key, for
/// messages. Throws UsageError for malformed patterns and where the first {*} is on a path that
/// does not exist or is not a list; a path that matches nothing is told to `sink` with the nearest
/// name, or thrown when strict.
ModuleSelection select_modules(const torch::nn::Module& model, const std::vector<std::string>& patterns,
                               const std::string& key, Strictness strictness, const DiagnosticSink& sink);

/// A module's path in another layout, and here.
using OtherPaths = std::vector<std::pair<std::string, std::string>>;

/// Gives patterns of the file that begin with one of the other paths ours; the first match counts. A pattern whose
/// first word is a child of the model stays. `sink` is told.
void translate_patterns(const torch::nn::Module& model, const OtherPaths& paths, Fsdp2Config& config,
                        const DiagnosticSink& sink);

/// Throws UsageErrors with all that select_modules would throw for the file's patterns, of all
/// keys.
void check_patterns(const torch::nn::Module& model, const Fsdp2Config& config, Strictness strictness);

/// "model.layers.{*} -> 30 modules (model.layers.0 .. model.layers.29)"
std::string describe_match(const PatternMatch& match);

}  // namespace megashard
