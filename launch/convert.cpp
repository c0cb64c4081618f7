#include "launch/convert.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "checkpoint/convert_dcp_to_hf.h"
#include "checkpoint/convert_hf_to_dcp.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

void print_line(const std::string& line) { std::cout << line << std::endl; }

void add_hf_to_dcp(CLI::App& app) {
  struct Flags {
    HfToDcpOptions options;
    std::vector<std::string> ties;
  };
  const auto flags = std::make_shared<Flags>();
  auto& options = flags->options;
  app.add_option("--hf-dir", options.hf_dir, "Hugging Face model directory (safetensors)")
      ->required();
  app.add_option("--dcp-dir", options.dcp_dir,
                 "gets release/ and latest_checkpointed_iteration.txt")
      ->required();
  app.add_option("--dcp-prefix", options.dcp_prefix, "stands behind \"model.\" in every key");
  app.add_option("--hf-prefix", options.hf_prefix,
                 "only weights with names that begin so, without it");
  app.add_option("--tie-weight-mapping", flags->ties,
                 "target=source: store the weight source as target too");
  app.add_flag("--to-bf16", options.to_bf16, "floating weights as bfloat16 (default: as stored)");
  app.callback([flags] {
    for (const auto& tie : flags->ties) {
      const auto equals = tie.find('=');
      if (equals == std::string::npos) {
        throw UsageError("--tie-weight-mapping takes target=source, got '" + tie + "'");
      }
      flags->options.tie_weight_mapping.emplace_back(tie.substr(0, equals), tie.substr(equals + 1));
    }
    convert_hf_to_dcp(flags->options, print_line);
    print_line("written: " + flags->options.dcp_dir + "/release");
  });
}

void add_dcp_to_hf(CLI::App& app) {
  const auto options = std::make_shared<DcpToHfOptions>();
  app.add_option("--load-dir", options->load_dir, "step folder: .../iter_0000100 or .../release")
      ->required();
  app.add_option("--save-dir", options->save_dir, "gets the Hugging Face model directory")
      ->required();
  app.add_option("--model-assets-dir", options->model_assets_dir,
                 "config and tokenizer files to copy")
      ->required();
  app.add_option("--dcp-prefix", options->dcp_prefix,
                 "only keys that begin with \"model.\" and this");
  app.add_option("--hf-prefix", options->hf_prefix, "stands before every weight's name");
  app.add_flag("--to-bf16", options->to_bf16, "floating weights as bfloat16 (default: as stored)");
  app.add_option("--max-shard-size", options->most_shard_bytes, "of a safetensors file [5GB]")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  app.callback([options] {
    convert_dcp_to_hf(*options, print_line);
    print_line("written: " + options->save_dir);
  });
}

struct Converter {
  const char* name;
  const char* purpose;
  void (*add)(CLI::App& app);  // declares the flags; its callback converts
};

constexpr Converter kConverters[] = {
    {"hf_to_dcp", "Hugging Face safetensors to a torch_dcp release", add_hf_to_dcp},
    {"dcp_to_hf", "a torch_dcp step to a Hugging Face directory", add_dcp_to_hf},
};

/// --hf_dir as --hf-dir; values stay as they are.
std::string with_dashes(std::string word) {
  if (!word.starts_with("--")) return word;
  const auto end = std::min(word.find('='), word.size());
  std::replace(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
  return word;
}

}  // namespace

int run_convert(int argc, char** argv) {
  CLI::App app("converts checkpoints and model directories", "megashard convert");
  app.require_subcommand(1);
  for (const auto& converter : kConverters) {
    auto* subcommand = app.add_subcommand(converter.name, converter.purpose);
    converter.add(*subcommand);
  }
  std::vector<std::string> words;
  for (int i = argc - 1; i > 0; --i)
    words.push_back(with_dashes(argv[i]));  // CLI11 takes them from the back
  try {
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
  } catch (const CLI::ParseError& error) {
    throw UsageError("convert: " + std::string(error.what()) +
                     "; megashard convert CONVERTER --help lists the flags");
  }
  return 0;
}

}  // namespace megashard
