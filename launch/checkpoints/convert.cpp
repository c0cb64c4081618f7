#include <malloc.h>

#include <c10/util/StringUtil.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"
#include "launch/checkpoints/converters.h"
#include "launch/checkpoints/flag_mistakes.h"
#include "launch/output/help_format.h"
#include "launch/output/status_line.h"
#include "launch/output/terminal.h"
#include "launch/shell/subcommands.h"

namespace megashard {
namespace {

struct Converter {
  const char* name;
  const char* purpose;
  void (*add)(CLI::App& app);  // declares the flags; its callback runs the converter
};

constexpr Converter kConverters[] = {
    {"hf_to_dcp", "Hugging Face safetensors to a torch_dcp release", add_hf_to_dcp},
    {"dcp_to_hf", "a torch_dcp step to a Hugging Face directory", add_dcp_to_hf},
    {"hf_to_torch_dist", "Hugging Face safetensors to a torch_dist release", add_hf_to_torch_dist},
    {"torch_dist_to_hf", "a torch_dist step to a Hugging Face directory", add_torch_dist_to_hf},
    {"dcp_to_torch_dist", "a torch_dcp step to torch_dist", add_dcp_to_torch_dist},
    {"torch_dist_to_dcp", "a torch_dist step to torch_dcp", add_torch_dist_to_dcp},
    {"dcp_to_torch", "a torch_dcp step to one file for torch.load", add_dcp_to_torch},
    {"torch_to_dcp", "a file of torch.save to a torch_dcp folder", add_torch_to_dcp},
};

/// Converts --hf_dir to --hf-dir; values are unchanged.
std::string with_dashes(std::string word) {
  if (!word.starts_with("--")) return word;
  const auto end = std::min(word.find('='), word.size());
  std::replace(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
  return word;
}

/// Arguments for CLI11, in reverse order: flags with dashes, `--flag true` as one word, and without the class that
/// precedes the converter in MindSpeed-MM's mm-convert.
std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool is_switch_value = word == "true" || word == "True" || word == "false" || word == "False";
    if (is_switch_value && !words.empty() && words.back().starts_with("--")) {
      words.back() += word[0] == 't' || word[0] == 'T' ? "=true" : "=false";
    } else if (i > 1 || word != "GenericDCPConverter") {
      words.push_back(with_dashes(word));
      if (!word.starts_with("--") || !word.ends_with("=")) continue;
      words.back().pop_back();  // CLI11 would use the next word as the value
      words.emplace_back();
    }
  }
  std::reverse(words.begin(), words.end());
  return words;
}

std::string converter_names() {
  std::vector<std::string> names;
  for (const auto& converter : kConverters) names.emplace_back(converter.name);
  return c10::Join(", ", names);
}

/// Suggests a converter for a misspelt word by edit distance only: parts of names ("to_hf") are ambiguous, and
/// dcp_to_hf must never be suggested for hf_to_dcp.
std::string suggestion_for(std::string word) {
  std::replace(word.begin(), word.end(), '-', '_');
  if (const auto two = word.find('2'); two != word.npos) word.replace(two, 1, "_to_");
  const Converter* nearest = nullptr;
  auto most = static_cast<int64_t>(word.size()) / 3;
  for (const auto& converter : kConverters) {
    const auto distance = edit_distance(word, converter.name, most);
    if (distance > most) continue;
    most = distance - 1;
    nearest = &converter;
  }
  return nearest == nullptr ? "" : std::string("; did you mean ") + nearest->name + "?";
}

bool is_converter(const std::string& word) {
  return std::any_of(std::begin(kConverters), std::end(kConverters),
                     [&](const Converter& each) { return each.name == word; });
}

void check_converter(const std::vector<std::string>& words) {
  if (words.empty())
    throw UsageError("convert: name a converter: " + converter_names() +
                     "; megashard convert CONVERTER --help lists its flags");
  const auto& word = words.back();
  if (word.starts_with("-") || is_converter(word)) return;
  throw UsageError("convert: there is no converter \"" + word + "\": there are " + converter_names() +
                   suggestion_for(word));
}

}  // namespace

int run_convert(int argc, char** argv) {
  // Allocate tensors with mmap, so that their memory is returned to the system when freed. By default glibc raises this
  // limit to the largest tensor seen, and small allocations between tensors would pin their memory.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  CLI::App app("converts checkpoints and model directories", "megashard convert");
  app.formatter(std::make_shared<HelpFormat>());
  app.require_subcommand(1);
  app.footer("Examples:\n"
             "  megashard convert dcp_to_hf --load-dir runs/a/best --save-dir out --model-assets-dir MODEL\n"
             "  megashard convert dcp_to_torch_dist --load-dir runs/a/iter_0000100 --save-dir converted\n"
             "--load-dir DIR means the latest whole step of a training, DIR/best the one that --save-best has kept.");
  for (const auto& converter : kConverters) {
    auto* subcommand = app.add_subcommand(converter.name, converter.purpose);
    converter.add(*subcommand);
  }
  auto words = words_of(argc, argv);
  check_converter(words);
  const auto given = words;
  const ProgressLine progress(print_line);
  try {
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
  } catch (const CLI::ParseError& error) {
    const auto& flags_of = is_converter(given.back()) ? *app.get_subcommand(given.back()) : app;
    throw UsageError("convert: " + what_is_wrong(error, flags_of, given) +
                     "; megashard convert CONVERTER --help lists the flags");
  }
  return 0;
}

}  // namespace megashard
