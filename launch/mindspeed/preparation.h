#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

/// How MindSpeed-MM's data section asks for conversations to be prepared: the flags of
/// launch/preprocess/preprocess_data.py. Defaults are MindSpeed-MM's.
struct Preparation {
  std::string place;  ///< "data.json: dataset_param": begins messages
  std::vector<std::string> inputs;
  std::string model;  ///< whose tokenizer and image processor
  std::string image_folder = "data";
  std::string cache_folder;  ///< where the prepared set lies; empty: beside the first input
  std::string turn_template;
  /// Where a record has its parts; an empty name: nowhere.
  std::map<std::string, std::string> columns = {
      {"messages", "conversations"}, {"images", ""},    {"system", ""},       {"role", "from"},
      {"content", "value"},          {"user", "human"}, {"assistant", "gpt"}, {"system_role", "system"}};
  std::optional<int64_t> cutoff_length;  ///< unset: --seq-length
  int64_t image_max_pixels = 768 * 768, image_min_pixels = 32 * 32;
  std::optional<int64_t> max_samples;
  bool mask_history = false, learn_questions = false, strip_text = false;
  int64_t workers = 1;

  /// For --data-path.
  std::string prefix() const;
  /// What the script records in the set: flags and their words.
  std::vector<std::pair<std::string, std::string>> flags() const;
  /// A shell's, which makes the set.
  std::string command() const;
};

/// Throws UsageError, with the command, for a set that is not there, or that was prepared of other
/// data (by their names and sizes) or by other flags.
void require_prepared(const Preparation& preparation);

/// Throws UsageError where pictures of a set of conversations were prepared by other values of these
/// flags. `place` begins the message. Other kinds of sets have none.
void require_pictures_prepared(const std::string& prefix, const std::map<std::string, int64_t>& flags,
                               const std::string& place);

}  // namespace megashard
