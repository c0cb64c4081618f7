#include "framework/data/missing_tokens.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "framework/data/conversation_dataset.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

bool is_file(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool has_tokens(const std::string& prefix) {
  return (is_file(prefix + ".bin") && is_file(prefix + ".idx")) || is_file(prefix + kConversationsSuffix);
}

std::string without(const std::string& path, const std::string& end) {
  return path.ends_with(end) ? path.substr(0, path.size() - end.size()) : "";
}

// The prefix of the folder's first data set by name; empty if there is none.
std::string set_in(const std::string& folder) {
  std::vector<std::string> sets;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    for (const char* end : {".idx", kConversationsSuffix}) {
      const std::string prefix = without(entry.path().string(), end);
      if (!prefix.empty() && has_tokens(prefix)) sets.push_back(prefix);
    }
  }
  return sets.empty() ? "" : *std::min_element(sets.begin(), sets.end());
}

// How to tokenise a file of JSON lines or text; empty for other files.
std::string tokenise(const std::string& path) {
  const bool lines =
      path.ends_with(".jsonl") || path.ends_with(".jsonl.gz") || path.ends_with(".json") || path.ends_with(".json.gz");
  const bool text = path.ends_with(".txt") || path.ends_with(".txt.gz") || path.ends_with(".md");
  if (!lines && !text) return "";
  const std::string stem = path.substr(0, path.find('.', path.rfind('/') + 1));
  return "\"" + path +
         "\" is text, and training reads tokens: run `python launch/preprocess/"
         "preprocess_data.py --input " +
         path + (text ? " --input-format text" : "") + " --output-prefix " + stem +
         " --tokenizer-model MODEL_DIR`, then give the prefix " + stem + "_text_document";
}

// The remedy, guessed from the prefix and from files with similar names.
std::string instead_of(const std::string& prefix) {
  for (const char* end : {".bin", ".idx", kConversationsSuffix}) {
    const std::string shorter = without(prefix, end);
    if (!shorter.empty()) return "give the prefix without " + std::string(end) + ": " + shorter;
  }
  for (const char* end : {"_text_document", "text_document", "_document"})
    if (has_tokens(prefix + end)) return "give the whole prefix, " + prefix + end;
  if (fs::is_directory(prefix)) {
    const std::string set = set_in(prefix);
    return "it is a folder; give the prefix of a .bin and a .idx file in it" +
           (set.empty() ? ", which preprocess_data.py writes" : ", such as " + set);
  }
  if (prefix.find_first_not_of("0123456789.") == prefix.npos)
    return "if it is a weight, a data set must follow it: WEIGHT PREFIX WEIGHT PREFIX ...";
  if (prefix.find(',') != prefix.npos) return "weights and prefixes are divided by spaces, not by commas";
  return "give the common prefix of a .bin and a .idx file, as launch/preprocess/"
         "preprocess_data.py writes them (PREFIX_text_document)";
}

}  // namespace

std::string why_no_tokens(const std::string& prefix) {
  const bool has_bin = is_file(prefix + ".bin");
  const std::string missing = prefix + (has_bin ? ".idx" : ".bin");
  if (has_bin || is_file(prefix + ".idx")) {
    return "data set \"" + prefix + "\": there is no file " + missing + " beside " + prefix +
           (has_bin ? ".bin" : ".idx") + "; copy it too, or write both again with launch/preprocess/preprocess_data.py";
  }
  for (const char* end : {"", ".jsonl", ".json", ".txt", ".jsonl.gz"}) {
    if (is_file(prefix + end)) {
      if (const std::string how = tokenise(prefix + end); !how.empty()) return how;
    }
  }
  return "data set \"" + prefix + "\": there is no file " + prefix + ".idx; " + instead_of(prefix);
}

}  // namespace megashard
