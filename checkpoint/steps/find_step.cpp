#include "checkpoint/steps/find_step.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <vector>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/agreement.h"

namespace megashard {
namespace {

/// What the first rank has found out.
struct Search {
  std::vector<CheckpointStep> candidates;  ///< the best first
  std::string trouble;                     ///< with the tracker; empty: none
};

Search search(const std::string& directory, std::optional<int64_t> ckpt_step) {
  if (ckpt_step) return {{step_at(directory, *ckpt_step)}, ""};
  Search found;
  if (!is_directory(directory)) return found;
  auto steps = list_steps(directory);
  std::optional<CheckpointStep> latest;
  try {
    latest = read_tracker(directory);
    if (!latest && steps.empty()) return found;
    if (!latest) found.trouble = directory + " has steps, but no latest_checkpointed_iteration.txt";
  } catch (const c10::Error& error) {
    found.trouble = error.what_without_backtrace();
  }
  if (latest) {
    const auto unwanted = [&](const CheckpointStep& step) {
      return step.is_release != latest->is_release || step.iteration > latest->iteration;
    };
    steps.erase(std::remove_if(steps.begin(), steps.end(), unwanted), steps.end());
    if (steps.empty() || steps[0].iteration != latest->iteration)
      found.trouble = "there is no " + latest->folder + ", which the tracker names";
  }
  found.candidates = std::move(steps);
  TORCH_CHECK(!found.candidates.empty(), found.trouble, ", nor a step before it: check the path, or name a step with --ckpt-step");
  return found;
}

std::string encode_search(const Search& found) {
  std::ostringstream text;
  text << found.candidates.size() << '\n';
  for (const auto& step : found.candidates) {
    text << std::filesystem::path(step.folder).filename().string() << '\n'
         << step.iteration << ' ' << step.is_release << '\n';
  }
  text << found.trouble;
  return text.str();
}

/// Each rank has the steps in its own `directory`, which may be another's by another path.
Search decode_search(const std::string& encoded, const std::string& directory) {
  std::istringstream text(encoded);
  std::string line;
  std::getline(text, line);
  Search found;
  found.candidates.resize(std::stoul(line));
  for (auto& step : found.candidates) {
    std::getline(text, step.folder);
    step.folder.insert(0, directory + "/");
    text >> step.iteration >> step.is_release;
    std::getline(text, line);
  }
  found.trouble.assign(std::istreambuf_iterator<char>(text), {});
  return found;
}

constexpr char kDamage = '!';  // begins an answer that is no list of sums

/// Reads this rank's stretch of the files' bytes, all of them behind each other, and returns what
/// it adds (xor) to the checksum of each file that it touches: its number and that.
std::string sums_of_stretch(const std::string& folder, const std::vector<ManifestFile>& files,
                            int64_t rank, int64_t ranks) {
  int64_t total = 0;
  for (const auto& file : files) total += file.bytes;
  const auto share = total / ranks + 1;
  const auto begin = std::min(total, share * rank);
  const auto end = std::min(total, begin + share);
  std::ostringstream sums;
  int64_t at = 0;  // where the file begins
  for (size_t i = 0; i < files.size(); at += files[i++].bytes) {
    const auto from = std::max(begin - at, int64_t{0});
    const auto to = std::min(end - at, files[i].bytes);
    if (from >= to) continue;
    const auto crc = crc32_of(InputFile(folder + "/" + files[i].name), from, to - from);
    sums << i << ' ' << crc32_combine(crc, 0, files[i].bytes - to) << '\n';
  }
  return sums.str();
}

/// The first that is not empty.
std::string first_damage(const std::vector<std::string>& answers) {
  const auto found = std::find_if(answers.begin(), answers.end(),
                                  [](const std::string& answer) { return !answer.empty(); });
  return found == answers.end() ? "" : *found;
}

/// The first file whose bytes have changed, as this rank's manifest says.
std::string changed_file(const std::string& folder, const ProcessGroupPtr& group) {
  std::vector<ManifestFile> files;
  const auto answers = gather_or_throw(group, [&]() -> std::string {
    try {
      if (!has_manifest(folder)) return "";
      files = read_manifest(folder).files;
      return sums_of_stretch(folder, files, rank_in(group), group == nullptr ? 1 : group->size());
    } catch (const c10::Error& error) {
      return kDamage + std::string(error.what_without_backtrace());
    }
  });
  std::vector<uint32_t> sums(files.size());
  for (const auto& answer : answers) {
    if (!answer.empty() && answer[0] == kDamage) return answer.substr(1);
    std::istringstream text(answer);
    size_t file = 0;
    for (uint32_t sum = 0; text >> file >> sum;) {
      if (file < sums.size()) sums[file] ^= sum;
    }
  }
  for (size_t i = 0; i < files.size(); ++i) {
    const auto damage = checksum_damage(folder, files[i], sums[i]);
    if (!damage.empty()) return damage;
  }
  return "";
}

/// The first damage that a rank has found, on all ranks.
std::string damage_on_any_rank(const std::string& folder, const FindOptions& options,
                               const ProcessGroupPtr& group) {
  const auto ranks = group == nullptr ? 1 : group->size();
  const auto found = gather_or_throw(group, [&] {
    const auto damage =
        step_damage(folder, VerifyDepth::kSizes, static_cast<size_t>(rank_in(group)),
                    static_cast<size_t>(ranks));
    return damage.empty() && options.also ? options.also(folder) : damage;
  });
  const auto damage = first_damage(found);
  if (!damage.empty() || options.depth == VerifyDepth::kSizes) return damage;
  const auto changed = changed_file(folder, group);
  // Disks of the ranks' own, and caches of a network's, may show them different manifests.
  return first_damage(gather_or_throw(group, [&] { return changed; }));
}

}  // namespace

std::optional<CheckpointStep> find_step(const std::string& directory, const ProcessGroupPtr& group,
                                        const FindOptions& options) {
  const auto answers = gather_or_throw(group, [&]() -> std::string {
    return rank_in(group) == 0 ? encode_search(search(directory, options.ckpt_step)) : "";
  });
  const auto [candidates, tracker_trouble] = decode_search(answers[0], directory);
  if (candidates.empty()) return std::nullopt;
  std::string trouble = tracker_trouble;
  std::vector<int64_t> passed_over;
  for (auto step : candidates) {
    const auto damage = damage_on_any_rank(step.folder, options, group);
    if (damage.empty()) {
      if (!trouble.empty() && options.notice)
        options.notice(trouble + "; " + step.folder + " is used instead");
      step.passed_over = std::move(passed_over);
      return step;
    }
    passed_over.push_back(step.iteration);
    trouble += (trouble.empty() ? "" : "; ") + damage;
  }
  TORCH_CHECK(!options.ckpt_step, "--ckpt-step ", *options.ckpt_step, ": ", trouble,
              ": put back what is damaged from a copy, or name another step");
  TORCH_CHECK(false, trouble, "; ", directory, " has no whole step to use instead: put back what is damaged from a copy, or give an empty folder to start anew");
}

}  // namespace megashard
