#include "launch/arguments/comma_words.h"

#include <algorithm>

namespace megashard {

std::vector<std::string> comma_words(const std::vector<std::string>& words) {
  std::vector<std::string> names;
  for (const auto& word : words) {
    for (size_t begin = 0; begin <= word.size();) {
      const auto end = std::min(word.find(',', begin), word.size());
      auto name = word.substr(begin, end - begin);
      name.erase(0, name.find_first_not_of(' '));
      name.erase(name.find_last_not_of(' ') + 1);
      if (!name.empty()) names.push_back(name);
      begin = end + 1;
    }
  }
  return names;
}

}  // namespace megashard
