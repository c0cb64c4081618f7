#include "launch/mindspeed/preparation.h"

#include <c10/util/StringUtil.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/arguments/argument_value.h"
#include "framework/data/conversation_dataset.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

bool same_words(const std::string& one, const std::string& other) {
  const auto a = parse_number(one), b = parse_number(other);
  return one == other || (a && b && *a == *b);
}

using Words = std::map<std::string, std::string>;

/// An object of strings recorded by the script; empty if absent.
Words recorded(const SafetensorsFile& file, const char* what) {
  const auto found = file.metadata().find(what);
  if (found == file.metadata().end()) return {};
  const auto object = nlohmann::json::parse(found->second, nullptr, /*allow_exceptions=*/false);
  Words words;
  if (!object.is_object()) return words;
  for (const auto& [name, value] : object.items()) words[name] = value.is_string() ? value.get<std::string>() : "";
  return words;
}

Words sizes_of(const std::vector<std::string>& inputs) {
  Words sizes;
  for (const auto& input : inputs) sizes[fs::path(input).filename()] = std::to_string(fs::file_size(input));
  return sizes;
}

std::string shown(const std::string& flag, const std::string& words) {
  return words.empty() ? flag : flag + " " + words;
}

/// Differences between the prepared set and the requested preparation; empty if none.
std::string differences(const Words& recorded, const Preparation& wanted) {
  std::vector<std::string> told;
  Words extra = recorded;
  for (const auto& [flag, words] : wanted.flags()) {
    const auto found = recorded.find(flag);
    extra.erase(flag);
    if (found == recorded.end()) {
      told.push_back("without " + shown(flag, words));
    } else if (!same_words(found->second, words)) {
      told.push_back("with " + shown(flag, found->second) + " instead of " + words);
    }
  }
  for (const auto& [flag, words] : extra) told.push_back("with " + shown(flag, words));
  return c10::Join(", ", told);
}

}  // namespace

std::string shell_word(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=:,+-";
  if (!word.empty() && word.find_first_not_of(kPlain) == word.npos) return word;
  std::string text = "'";
  for (const char letter : word) text += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return text + "'";
}

std::string Preparation::prefix() const {
  const fs::path first = inputs.front();
  const fs::path folder = cache_folder.empty() ? first.parent_path() : fs::path(cache_folder);
  return (folder / first.stem()).string();
}

std::vector<std::pair<std::string, std::string>> Preparation::flags() const {
  std::vector<std::string> words;
  for (const auto& [key, name] : columns) words.push_back(key + "=" + name);
  std::vector<std::pair<std::string, std::string>> all = {{"--template", turn_template},
                                                          {"--columns", c10::Join(" ", words)}};
  if (!has_tiles) {
    all.emplace_back("--image-max-pixels", std::to_string(image_max_pixels));
    all.emplace_back("--image-min-pixels", std::to_string(image_min_pixels));
  }
  const auto add = [&all](const char* flag, const std::optional<int64_t>& number) {
    if (number) all.emplace_back(flag, std::to_string(*number));
  };
  add("--cutoff-length", cutoff_length);
  add("--max-samples", max_samples);
  for (const auto& [flag, on] : {std::pair("--mask-history", mask_history),
                                 {"--learn-questions", learn_questions},
                                 {"--strip-text", strip_text},
                                 {"--fix-mistral-regex", fix_mistral_regex},
                                 {"--disable-thinking", disable_thinking}}) {
    if (on) all.emplace_back(flag, "");
  }
  return all;
}

std::string Preparation::command() const {
  const auto folder = fs::path(prefix()).parent_path();
  std::string text;
  if (!folder.empty() && !fs::is_directory(folder)) text = "mkdir -p " + shell_word(folder.string()) + " && ";
  text += "python launch/preprocess/preprocess_data.py --input-format conversations --input";
  for (const auto& input : inputs) text += " " + shell_word(input);
  text += " --tokenizer-model " + shell_word(model) + " --image-folder " + shell_word(image_folder) +
          " --output-prefix " + shell_word(prefix());
  for (const auto& [flag, words] : flags()) {
    text += " " + flag;
    if (words.empty()) continue;
    for (const auto& word : split_text(words, " ")) text += " " + shell_word(word);
  }
  return workers > 1 ? text + " --workers " + std::to_string(workers) : text;
}

void require_prepared(const Preparation& preparation) {
  const auto prefix = preparation.prefix(), path = prefix + kConversationsSuffix;
  const auto remedy = "; run `" + preparation.command() + "`";
  const auto& place = preparation.place;
  for (const auto& input : preparation.inputs)
    require(fs::is_regular_file(input), place + ": there is no file " + input + "; correct basic_parameters.dataset.");
  require(fs::is_regular_file(path), place + ": " + preparation.inputs.front() + " is not prepared (there is no " +
                                         path + "), and training reads tokens" + remedy + ".");
  const SafetensorsFile file(path);
  require(recorded(file, "inputs") == sizes_of(preparation.inputs),
          place + ": " + path + " was prepared of other data than " + c10::Join(", ", preparation.inputs) + remedy +
              " again.");
  const auto other = differences(recorded(file, "flags"), preparation);
  require(other.empty(), place + ": " + path + " was prepared " + other + remedy + " again.");
}

void require_pictures_prepared(const std::string& prefix, const std::map<std::string, int64_t>& flags,
                               const std::string& place) {
  const auto path = prefix + kConversationsSuffix;
  if (flags.empty() || !fs::is_regular_file(path)) return;
  const SafetensorsFile file(path);
  if (!file.contains("image_grid_thw") || file.info("image_grid_thw").sizes[0] == 0) return;
  const Words words = recorded(file, "flags");
  for (const auto& [flag, value] : flags) {
    const auto found = words.find(flag);
    const auto text = std::to_string(value);
    require(found != words.end() && same_words(found->second, text),
            place + " asks for " + flag + " " + text + ", but " + path + " was prepared " +
                (found == words.end() ? "without it" : "with " + found->second) +
                "; prepare it again by launch/preprocess/preprocess_data.py with " + flag + " " + text + ".");
  }
}

}  // namespace megashard
