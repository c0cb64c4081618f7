#include "framework/arguments/nearest_name.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace megashard {

namespace {

std::string bare_name(std::string_view name) {
  std::string text(name.substr(std::min(name.find_first_not_of('-'), name.size())));
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return c == '-' ? '_' : static_cast<char>(std::tolower(c)); });
  return text;
}

int64_t length_difference(std::string_view one, std::string_view other) {
  return static_cast<int64_t>(std::max(one.size(), other.size()) - std::min(one.size(), other.size()));
}

int64_t smallest_of(const std::vector<int64_t>& row) { return *std::min_element(row.begin(), row.end()); }

}  // namespace

int64_t edit_distance(std::string_view from, std::string_view to, int64_t most) {
  if (length_difference(from, to) > most) return most + 1;
  const size_t columns = to.size() + 1;
  std::vector<int64_t> before(columns), above(columns), row(columns);
  for (size_t j = 0; j < columns; ++j) above[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= from.size(); ++i) {
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j < columns; ++j) {
      const int64_t substitution = above[j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, substitution});
      const bool swapped = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
    // Later rows depend on these two only.
    if (smallest_of(above) > most && smallest_of(before) > most) return most + 1;
  }
  return above[to.size()];
}

namespace {

/// True if `name` is a negation of `positive`; both without hyphens.
bool negates(const std::string& name, const std::string& positive) {
  constexpr std::array<std::string_view, 5> kNegations = {"no_", "not_", "without_", "disable_", "un"};
  return std::any_of(kNegations.begin(), kNegations.end(), [&](std::string_view negation) {
    if (!name.starts_with(negation)) return false;
    const auto rest = std::string_view(name).substr(negation.size());
    if (negation == "un") return positive.starts_with(rest.substr(0, 3));
    const auto bare = negation.substr(0, negation.size() - 1);
    if (!positive.starts_with(bare)) return true;
    // "nosave" is a negation, "normal" is not.
    const auto tail = std::string_view(positive).substr(bare.size());
    const auto most = static_cast<int64_t>(name.size());
    return edit_distance(positive, rest, most) < edit_distance(tail, rest, most);
  });
}

}  // namespace

std::optional<std::string> nearest_name(std::string_view name, const std::vector<std::string>& known) {
  constexpr size_t kShortestPart = 4;
  const std::string wanted = bare_name(name);
  if (wanted == "gpu" && std::ranges::find(known, "cuda") != known.end()) return "cuda";  // not cpu
  const std::string* nearest = nullptr;
  int64_t allowed = std::max<int64_t>(1, static_cast<int64_t>(wanted.size()) / 3);
  for (const auto& candidate : known) {
    const std::string text = bare_name(candidate);
    const bool contained = (wanted.size() >= kShortestPart && text.find(wanted) != text.npos) ||
                           (text.size() >= kShortestPart && wanted.find(text) != wanted.npos);
    // A missing prefix is a small mistake.
    const auto distance = contained ? (length_difference(wanted, text) + 2) / 3 : edit_distance(wanted, text, allowed);
    if (distance > allowed || negates(wanted, text) || negates(text, wanted)) continue;
    allowed = distance - 1;  // later candidates must be nearer
    nearest = &candidate;
  }
  return nearest == nullptr ? std::nullopt : std::optional(*nearest);
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
  const auto nearest = nearest_name(name, known);
  return nearest ? "; did you mean " + *nearest + "?" : "";
}

}  // namespace megashard
