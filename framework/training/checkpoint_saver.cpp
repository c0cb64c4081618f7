#include "framework/training/checkpoint_saver.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "checkpoint/steps/manifest.h"
#include "checkpoint/values/gather_values.h"
#include "framework/mistakes.h"
#include "framework/training/output_paths.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/routed_process_group.h"

namespace megashard {
namespace {

std::string size_text(uint64_t bytes) {
  constexpr int kGiB = 30, kKiB = 10;
  const bool is_large = bytes >> kGiB > 0;
  return std::to_string(bytes >> (is_large ? kGiB : kKiB)) + (is_large ? " GiB" : " KiB");
}

}  // namespace

ProcessGroupPtr make_saving_group(const ProcessGroupPtr& group, const std::string& name) {
  if (group->size() == 1 || !has_host_backend(group)) return group;
  return make_host_group(group, name);
}

CheckpointSaver::CheckpointSaver(TrainingState& state, ProcessGroupPtr group, Say say, Say warn, Say failed)
    : state_(state),
      group_(std::move(group)),
      say_(std::move(say)),
      warn_(std::move(warn)),
      failed_(std::move(failed)) {}

void CheckpointSaver::check() {
  if (!state_.arguments.save) return;
  std::string warning;
  value_errors_are_mistakes([&] { all_or_throw(group_, [&] { warning = check_save_format(state_); }); });
  if (!warning.empty()) warn_(warning);
  saving_group_ = make_saving_group(group_, "saves");
}

/// Empty, or why the folder is refused. Of the first rank.
std::string CheckpointSaver::settle_run(bool converts) {
  const Arguments& arguments = state_.arguments;
  const auto& folder = *arguments.save;
  const auto steps = list_steps(folder);
  const bool loads_here = saves_where_it_loads(state_);
  state_.run = new_run();
  if (loaded_) {
    const auto loaded = run_of_step(loaded_->folder);
    const bool is_newest = std::none_of(steps.begin(), steps.end(), [this](const auto& step) {
      return !step.is_release && step.iteration > loaded_->iteration;
    });
    const bool is_same = converts || (loads_here && is_newest && !loaded.id.empty());
    state_.run = is_same ? loaded : gone_on_from(loaded, loaded_->iteration);
  }
  const auto is_other = [&](const CheckpointStep& step) {
    return !converts || kinship(state_.run, run_of_step(step.folder).id, step.iteration) == Kinship::kOther;
  };
  if (loads_here || std::none_of(steps.begin(), steps.end(), is_other)) return "";
  const auto name = [](const CheckpointStep& step) { return std::filesystem::path(step.folder).filename().string(); };
  const auto which = " (" + name(steps.back()) + (steps.size() > 1 ? " to " + name(steps.front()) : "") + ")";
  if (arguments.overwrite_run) {
    state_.replaces_other_runs = true;
    say_("--overwrite-run: the steps of the earlier run in " + folder + which +
         " are removed when this run's first step is complete");
    return "";
  }
  return "--save " + folder + " holds steps of an earlier run" + which +
         ", and this run does not go on from them: give --load " + folder +
         " to go on, an empty folder to start anew, or --overwrite-run to have them removed when "
         "this run's first step is complete";
}

void CheckpointSaver::warn_of_little_room() {
  const auto& folder = *state_.arguments.save;
  const auto needed = static_cast<uint64_t>(least_step_bytes(state_));
  std::error_code error;
  const auto room = std::filesystem::space(folder, error).available;
  if (error || room >= needed) return;
  warn_("the disk of --save " + folder + " has " + size_text(room) +
        " left, and a checkpoint of this run takes more than " + size_text(needed) +
        ": make room before the first one is due, or give another folder");
}

void CheckpointSaver::begin_run(bool converts) {
  if (!state_.arguments.save) return;
  // Ranks may see the folder differently: the first rank's view counts.
  const auto answer = first_rank_value(group_, [&]() -> Value {
    lock_ = std::make_unique<RunLock>(*state_.arguments.save);
    if (!lock_->is_held()) {
      warn_("the file system of --save " + *state_.arguments.save +
            " has no locks, so nothing keeps a second run out of it");
    }
    const auto refusal = settle_run(converts);
    if (!refusal.empty()) return refusal;
    warn_of_little_room();
    return state_.replaces_other_runs;
  });
  const auto* refusal = answer.get_if<std::string>();
  require(refusal == nullptr, refusal == nullptr ? "" : *refusal);
  state_.replaces_other_runs = answer.as_bool();
  if (state_.arguments.save_best) find_best();
}

void CheckpointSaver::find_best() {
  const auto& folder = *state_.arguments.save;
  const auto found = first_rank_value(group_, [&]() -> Value {
    List marked;
    const auto best = read_best_step(folder);
    if (!best) return marked;
    const auto step = step_of(*best, folder);
    const bool is_own = step && kinship(state_.run, run_of_step(step->folder).id, step->iteration) == Kinship::kOwn;
    marked.items = {best->iteration, best->validation_loss, is_own};
    return marked;
  });
  const auto& marked = found.get_if<List>()->items;
  if (marked.empty()) return;
  marked_ = marked[0].as_int();
  if (marked[2].as_bool()) best_ = BestStep{*marked_, marked[1].as_double()};
}

void CheckpointSaver::enable_async() {
  async_ = std::make_unique<AsyncSaver>(group_, AsyncSaverOptions{.deadline = group_->timeout(), .say = say_});
}

void CheckpointSaver::keep_folder() {
  const auto& folder = *state_.arguments.save;
  const auto is_new = first_rank_value(group_, [&]() -> Value {
    return lock_->take_again() && list_steps(folder).empty() && last_in_folder().has_value();
  });
  if (!is_new.as_bool()) return;
  warn_("--save " + folder +
        " was removed or renamed while this run saves to it: it is made anew, without older steps");
  last_saved_.reset();
  loaded_at_.reset();
  marked_.reset();
  best_.reset();
}

void CheckpointSaver::start_save() {
  keep_folder();
  // The step that is marked is written anew, with other weights.
  if (marked_ == state_.progress.step) {
    all_or_throw(group_, [&] {
      if (group_->rank() == 0) unmark_best_step(*state_.arguments.save);
    });
    marked_.reset();
    best_.reset();
  }
  save_training_checkpoint(state_, saving_group_, warn_, async_.get());
}

void CheckpointSaver::save(std::optional<double> best_loss) {
  finish();
  say_(saving_line(state_.progress.step, *state_.arguments.save, format_name(state_.arguments.ckpt_format)));
  replaces_damaged_ = std::erase(state_.damaged_steps, state_.progress.step) > 0;
  being_saved_ = state_.progress.step;
  loss_of_saved_ = best_loss;
  try {
    start_save();
  } catch (const c10::DistError&) {
    throw;
  } catch (const std::exception& error) {
    return note_failure("the checkpoint of iteration " + std::to_string(state_.progress.step) +
                        " was not saved: " + error_text(error));
  }
  if (async_ == nullptr) finish();
}

void CheckpointSaver::step_complete(const StepReport&, const Requests& merged) {
  const bool written = async_ != nullptr && async_->state() == AsyncSaver::State::kWritten;
  if (written || merged.save_failed) finish();
}

void CheckpointSaver::finish() {
  if (!being_saved_) return;
  try {
    if (async_ != nullptr) async_->wait();
  } catch (const c10::DistError&) {
    throw;
  } catch (const std::exception& error) {
    return note_failure(error_text(error));
  }
  last_saved_ = std::exchange(being_saved_, std::nullopt);
  failed_in_a_row_ = 0;
  failure_.clear();
  state_.replaces_other_runs = false;  // this save has done that
  say_(saved_line(*last_saved_, *state_.arguments.save));
  if (loss_of_saved_) mark({*last_saved_, *std::exchange(loss_of_saved_, std::nullopt)});
}

void CheckpointSaver::note_failure(const std::string& why) {
  if (replaces_damaged_) state_.damaged_steps.push_back(*being_saved_);
  being_saved_.reset();
  loss_of_saved_.reset();
  failure_ = why + newest_whole();
  ++failed_in_a_row_;
  if (failed_) failed_(why);
  warn_(failure_ + c10::str("; the next save tries again (", failed_in_a_row_, " of --max-failed-saves ",
                            state_.arguments.max_failed_saves, " in a row)"));
}

std::string CheckpointSaver::newest_whole() const {
  const auto last = last_in_folder();
  return last ? c10::str("; the last whole one in ", *state_.arguments.save, " is of iteration ", *last)
              : c10::str("; ", *state_.arguments.save, " holds none of this run");
}

void CheckpointSaver::check_limit() const {
  const auto limit = state_.arguments.max_failed_saves;
  TORCH_CHECK(failed_in_a_row_ < limit, "as many saves in a row have failed as --max-failed-saves allows (", limit,
              "); the last: ", failure_);
}

void CheckpointSaver::check_last() const {
  TORCH_CHECK(failure_.empty(), "training has ended without its last checkpoint: ", failure_);
}

void CheckpointSaver::mark(const BestStep& best) {
  try {
    all_or_throw(group_, [&] {
      if (group_->rank() == 0) mark_best_step(*state_.arguments.save, best);
    });
  } catch (const c10::DistError&) {
    throw;
  } catch (const std::exception& error) {
    return warn_(c10::str("the checkpoint of iteration ", best.iteration, " is the best one and is saved, but ",
                          *state_.arguments.save, " does not say so: ", error_text(error)));
  }
  best_ = best;
  marked_ = best.iteration;
  say_(best_line(best.iteration, best.validation_loss));
}

void CheckpointSaver::mark_best(double validation_loss) {
  finish();
  if (is_saved()) mark({state_.progress.step, validation_loss});
}

bool CheckpointSaver::is_best(double validation_loss) const {
  const auto& best = loss_of_saved_ ? loss_of_saved_ : best_ ? std::optional(best_->validation_loss) : std::nullopt;
  return state_.arguments.save_best && std::isfinite(validation_loss) && (!best || validation_loss < *best);
}

bool CheckpointSaver::has_failed() const { return async_ != nullptr && async_->state() == AsyncSaver::State::kFailed; }

std::optional<int64_t> CheckpointSaver::last_in_folder() const {
  if (last_saved_) return last_saved_;
  return saves_where_it_loads(state_) ? loaded_at_ : std::nullopt;
}

bool CheckpointSaver::is_saved() const {
  if (was_just_saved()) return true;
  const Arguments& arguments = state_.arguments;
  if (loaded_at_ != state_.progress.step) return false;
  if (arguments.auto_detect_ckpt_format) return false;  // the format may be another one
  // Ranks may see the folders differently: the first rank's view counts.
  return first_rank_value(group_, [&] { return saves_where_it_loads(state_); }).as_bool();
}

void CheckpointSaver::convert() {
  Arguments to = state_.arguments;
  const std::string loaded = to.auto_detect_ckpt_format ? "checkpoint" : format_name(to.ckpt_format);
  to.ckpt_format = *to.ckpt_convert_format;
  const std::string converted = format_name(to.ckpt_format);
  to.save = *to.ckpt_convert_save + "/" + converted;
  TrainingState state{.arguments = to,
                      .model = state_.model,
                      .optimizer = state_.optimizer,
                      .schedule = state_.schedule,
                      .device = state_.device,
                      .progress = state_.progress,
                      .loaded_from = state_.loaded_from,
                      .damaged_steps = state_.damaged_steps,
                      .scaler = state_.scaler};
  CheckpointSaver saver(state, group_, say_, warn_);
  if (loaded_) saver.note_loaded(*loaded_);
  saver.check();
  try_output_paths(output_paths(to, /*saves=*/false), group_);
  saver.begin_run(/*converts=*/true);
  saver.save();
  saver.check_last();
  say_("> converted checkpoint: " + loaded + " -> " + converted + ".");
}

}  // namespace megashard
