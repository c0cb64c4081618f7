#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

/// Preparation of conversations requested by MindSpeed-MM's data section: flags of
/// launch/preprocess/preprocess_data.py. Defaults are MindSpeed-MM's.
struct Preparation {
  std::string place;  ///< "data.json: dataset_param", the beginning of messages
  std::vector<std::string> inputs;
  std::string model;  ///< model with the tokenizer and image processor
  std::string image_folder = "data";
  std::string cache_folder;  ///< folder of the prepared set; empty: that of the first input
  std::string turn_template;
  /// Names of a record's parts; empty: absent.
  std::map<std::string, std::string> columns = {{"messages", "conversations"},
                                                {"images", ""},
                                                {"audios", ""},
                                                {"system", ""},
                                                {"role", "from"},
                                                {"content", "value"},
                                                {"user", "human"},
                                                {"assistant", "gpt"},
                                                {"system_role", "system"}};
  std::optional<int64_t> cutoff_length;  ///< unset: --seq-length
  int64_t image_max_pixels = 768 * 768, image_min_pixels = 32 * 32;
  bool has_tiles = false;  ///< pictures become tiles, whatever their size
  std::optional<int64_t> max_samples;
  bool mask_history = false, learn_questions = false, strip_text = false, fix_mistral_regex = false;
  bool disable_thinking = false;
  int64_t workers = 1;

  /// Path for --data-path.
  std::string prefix() const;
  /// Flags and values that the script records in the set.
  std::vector<std::pair<std::string, std::string>> flags() const;
  /// Shell command that creates the set.
  std::string command() const;
};

/// Quotes a word for a shell.
std::string shell_word(const std::string& word);

/// Throws UsageError with the command if the set does not exist, or was prepared from other data (by names and sizes)
/// or with other flags.
void require_prepared(const Preparation& preparation);

/// Throws UsageError if the images of a set of conversations were prepared with other values of these flags. `place`
/// begins the message. Other kinds of sets have no images.
void require_pictures_prepared(const std::string& prefix, const std::map<std::string, int64_t>& flags,
                               const std::string& place);

}  // namespace megashard
