#include "checkpoint/steps/find_step.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/values/gather_values.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

/// Errors of a step that cannot be read now are rethrown: no other step is used instead.
template <class Work>
auto readable_or_stop(const Work& work) {
  try {
    return work();
  } catch (const UnreadableError& error) {
    TORCH_CHECK(false, error.what_without_backtrace(),
                ": it may be whole, so nothing else is loaded instead; make it readable and start again, or name "
                "another step with --ckpt-step");
  }
}

/// Result of the first rank's search.
struct Search {
  std::vector<CheckpointStep> candidates;  ///< the best first
  std::string trouble{};                   ///< problem with the tracker; empty: none
  bool is_asked_for = false;               ///< requested by name: no other one is used
};

/// Path of a step's folder, whose last component is the step's name.
std::string step_path(const std::string& folder) {
  const auto whole = [](const std::filesystem::path& path) { return path.has_filename() ? path : path.parent_path(); };
  const auto given = whole(std::filesystem::path(folder).lexically_normal());
  if (step_named(given.filename(), given)) return given.has_parent_path() ? given : std::filesystem::path(".") / given;
  std::error_code error;  // for a path that does not exist
  return whole(std::filesystem::weakly_canonical(folder, error));
}

/// The step if `folder` is a step's own folder and not the directory of a training.
std::optional<CheckpointStep> as_step(const std::string& folder, std::optional<int64_t> ckpt_step) {
  const auto path = step_path(folder);
  const auto step = step_named(std::filesystem::path(path).filename(), path);
  const bool is_numbered = step && !step->is_release;
  const bool is_there = is_directory(folder);
  TORCH_CHECK_VALUE(is_there || !is_numbered || path_exists(folder), "there is no step ", folder,
                    ": check the path, or give its parent by --load, for the latest step");
  if (!is_there || has_tracker(folder)) return std::nullopt;
  const auto has = [&](const char* name) { return path_exists(folder + "/" + name); };
  const bool holds_one = has(kDcpMetadataFile) || has(kFormatFile) || has(kCommonFile);
  if (!holds_one && !(is_numbered && list_steps(folder).empty())) return std::nullopt;
  TORCH_CHECK_VALUE(step, folder,
                    " is a step, but its name does not say of which iteration: rename it as iter_0000010, and give its "
                    "parent by --load, with --ckpt-step");
  TORCH_CHECK_VALUE(!ckpt_step || (is_numbered && step->iteration == *ckpt_step), folder, " is itself the step ",
                    step->is_release ? "release" : std::to_string(step->iteration), ", and --ckpt-step asks for ",
                    *ckpt_step, ": leave it out, or give the parent by --load");
  return step;
}

Search search(const std::string& directory, std::optional<int64_t> ckpt_step) {
  if (auto step = as_step(directory, ckpt_step)) {
    step->folder.clear();  // filled in by every rank with its own path
    return {{*step}, "", true};
  }
  if (ckpt_step) return {{step_at(directory, *ckpt_step)}, "", true};
  Search found;
  if (!is_directory(directory)) return found;
  auto steps = list_steps(directory);
  std::optional<CheckpointStep> latest;
  try {
    latest = read_tracker(directory);
    if (!latest && steps.empty()) return found;
    if (!latest) found.trouble = directory + " has steps, but no latest_checkpointed_iteration.txt";
  } catch (const UnreadableError&) {
    throw;
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
  TORCH_CHECK(!found.candidates.empty(), found.trouble,
              ", nor a step before it: check the path, or name a step with --ckpt-step");
  return found;
}

Value message_of(const Search& found) {
  List steps;
  for (const auto& step : found.candidates) {
    const auto name = std::filesystem::path(step.folder).filename().string();
    steps.items.emplace_back(Tuple{{name, step.iteration, step.is_release}});
  }
  return Tuple{{std::move(steps), found.trouble, found.is_asked_for}};
}

/// Builds paths with this rank's `directory`, which may be another path to the same folder.
Search search_in(const Value& message, const std::string& directory) {
  const auto& fields = message.as_items();
  Search found{{}, fields.at(1).as_string(), fields.at(2).as_bool()};
  for (const auto& item : fields.at(0).as_items()) {
    const auto& step = item.as_items();
    const auto& name = step.at(0).as_string();
    found.candidates.push_back(
        {name.empty() ? step_path(directory) : directory + "/" + name, step.at(1).as_int(), step.at(2).as_bool()});
  }
  return found;
}

/// Runs `work` on the first rank and returns its result on all.
template <class Work>
Search first_ranks_search(const std::string& directory, const ProcessGroupPtr& group, const Work& work) {
  return search_in(first_rank_value(group, [&] { return message_of(readable_or_stop(work)); }), directory);
}

/// The run in a readable manifest; nullopt otherwise.
std::optional<RunHistory> known_run(const CheckpointStep& step) {
  try {
    if (has_manifest(step.folder)) return read_manifest(step.folder).run;
  } catch (const UnreadableError&) {
    throw;
  } catch (const c10::Error&) {  // the step is damaged
  }
  return std::nullopt;
}

/// Removes the steps of other runs from the list and returns a message about them; empty if there are none. `meant` is
/// the tracker's step; null if the tracker names none, and then there may be only one run.
std::string take_out_other_runs(std::vector<CheckpointStep>& steps, const CheckpointStep* meant) {
  auto run = meant == nullptr ? std::nullopt : known_run(*meant);
  const bool is_sure = run.has_value();
  for (size_t i = 0; i < steps.size() && !run; ++i) run = known_run(steps[i]);
  if (!run) return "";
  std::string others;
  std::erase_if(steps, [&](const CheckpointStep& step) {
    if (has_manifest(step.folder) && !known_run(step)) return false;  // damaged and reported as such
    const auto id = known_run(step).value_or(RunHistory{}).id;
    if (kinship(*run, id, step.iteration) == Kinship::kOwn) return false;
    others += (others.empty() ? "" : ", ") + step.folder;
    return true;
  });
  TORCH_CHECK_VALUE(
      others.empty() || is_sure, others, " and ", steps.empty() ? "others" : steps[0].folder,
      " are steps of different runs, and nothing says which of them is meant: name a step with --ckpt-step");
  return others.empty() ? "" : others + (others.find(", ") == others.npos ? " is" : " are") + " of another run";
}

/// Removes other runs' steps on all ranks. The first `tried` candidates are damaged.
void keep_one_run(Search& found, size_t tried, const std::string& directory, const ProcessGroupPtr& group) {
  const auto rest = first_ranks_search(directory, group, [&] {
    const auto first = found.candidates.begin();
    Search rest{{first + static_cast<std::ptrdiff_t>(tried), found.candidates.end()}};
    rest.trouble = take_out_other_runs(rest.candidates, tried == 0 ? nullptr : &*first);
    return rest;
  });
  found.candidates.resize(tried);
  found.candidates.insert(found.candidates.end(), rest.candidates.begin(), rest.candidates.end());
  if (!rest.trouble.empty()) found.trouble += (found.trouble.empty() ? "" : "; ") + rest.trouble;
}

/// Reads this rank's range of the concatenated files and returns its contribution (xor) to the checksum of each file.
List sums_of_stretch(const std::string& folder, const std::vector<WrittenFile>& files, int64_t rank, int64_t ranks) {
  int64_t total = 0;
  for (const auto& file : files) total += file.bytes;
  const auto share = total / ranks + 1;
  const auto begin = std::min(total, share * rank);
  const auto end = std::min(total, begin + share);
  LongWork work("check", end - begin);
  List sums;
  int64_t at = 0;  // start of the file
  for (const auto& file : files) {
    const auto from = std::max(begin - at, int64_t{0});
    const auto to = std::min(end - at, file.bytes);
    int64_t sum = 0;
    if (from < to) {
      const auto crc = crc32_of(InputFile(folder + "/" + file.name), from, to - from, &work);
      sum = join_crc32(crc, 0, file.bytes - to);
    }
    sums.items.emplace_back(sum);
    at += file.bytes;
  }
  return sums;
}

/// Answer of a rank about a step: a string is a damage, any other value none.
std::string first_damage(const std::vector<Value>& answers) {
  for (const auto& answer : answers) {
    if (const auto* damage = answer.get_if<std::string>()) return *damage;
  }
  return "";
}

Value damage_or_none(std::string damage) { return damage.empty() ? Value() : Value(std::move(damage)); }

/// The first file with wrong checksum according to this rank's manifest.
std::string changed_file(const std::string& folder, const ProcessGroupPtr& group) {
  std::vector<WrittenFile> files;
  const auto read = [&]() -> Value {
    try {
      if (!has_manifest(folder)) return {};
      files = read_manifest(folder).files;
      return sums_of_stretch(folder, files, rank_in(group), size_in(group));
    } catch (const UnreadableError&) {
      throw;
    } catch (const c10::Error& error) {
      return error_text(error);
    }
  };
  const auto answers = gather_values(group, [&] { return readable_or_stop(read); });
  const auto unread = first_damage(answers);
  if (!unread.empty()) return unread;
  for (size_t i = 0; i < files.size(); ++i) {
    uint32_t sum = 0;
    for (const auto& answer : answers) {
      const auto* sums = answer.get_if<List>();
      if (sums != nullptr && i < sums->items.size()) sum ^= static_cast<uint32_t>(sums->items[i].as_int());
    }
    const auto damage = checksum_damage(folder, files[i], sum);
    if (!damage.empty()) return damage;
  }
  return "";
}

/// The first damage that any rank has found. Same on all ranks.
std::string damage_on_any_rank(const std::string& folder, const FindOptions& options, const ProcessGroupPtr& group) {
  const auto check = [&] {
    const auto rank = static_cast<size_t>(rank_in(group));
    auto damage = step_damage(folder, VerifyDepth::kSizes, rank, static_cast<size_t>(size_in(group)));
    if (damage.empty() && options.further_damage) damage = options.further_damage(folder);
    return damage_or_none(std::move(damage));
  };
  const auto damage = first_damage(gather_values(group, [&] { return readable_or_stop(check); }));
  if (!damage.empty() || options.depth == VerifyDepth::kSizes) return damage;
  const auto changed = changed_file(folder, group);
  // Local disks or caches of a network file system may show the ranks different manifests.
  return first_damage(gather_values(group, [&] { return damage_or_none(changed); }));
}

}  // namespace

std::optional<CheckpointStep> find_step(const std::string& directory, const ProcessGroupPtr& group,
                                        const FindOptions& options) {
  auto found = first_ranks_search(directory, group, [&] { return search(directory, options.ckpt_step); });
  if (found.candidates.empty()) return std::nullopt;
  std::vector<int64_t> passed_over;
  if (!found.trouble.empty()) keep_one_run(found, 0, directory, group);
  const bool tracker_is_whole = found.trouble.empty();
  auto& trouble = found.trouble;
  for (size_t next = 0; next < found.candidates.size(); ++next) {
    auto step = found.candidates[next];
    const auto damage = damage_on_any_rank(step.folder, options, group);
    if (damage.empty()) {
      if (!trouble.empty() && options.notice) options.notice(trouble + "; " + step.folder + " is used instead");
      step.passed_over = std::move(passed_over);
      return step;
    }
    passed_over.push_back(step.iteration);
    trouble += (trouble.empty() ? "" : "; ") + damage;
    if (next == 0 && tracker_is_whole && !found.is_asked_for) keep_one_run(found, 1, directory, group);
  }
  const auto asked = options.ckpt_step ? "--ckpt-step " + std::to_string(*options.ckpt_step) + ": " : "";
  TORCH_CHECK(!found.is_asked_for, asked, trouble, ": put back what is damaged from a copy, or name another step");
  TORCH_CHECK(
      false, trouble, "; ", directory,
      " has no whole step to use instead: put back what is damaged from a copy, or give an empty folder to start anew");
}

}  // namespace megashard
