#include "framework/training/training_saves.h"

#include <algorithm>
#include <utility>

#include "checkpoint/steps/agreement.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/routed_process_group.h"

namespace megashard {

ProcessGroupPtr make_saving_group(const ProcessGroupPtr& group, const std::string& name) {
  if (group->size() == 1 || !has_host_backend(group)) return group;
  return make_host_group(group, name, std::max(AsyncSaverOptions().deadline, group->timeout()));
}

TrainingSaves::TrainingSaves(TrainingState& state, ProcessGroupPtr group,
                             std::function<void(const std::string& line)> say)
    : state_(state), group_(std::move(group)), say_(std::move(say)) {}

void TrainingSaves::check() {
  if (!state_.arguments.save) return;
  std::string warning;
  all_or_throw(group_, [&] { warning = check_save_format(state_); });
  if (!warning.empty()) say_("WARNING: " + warning);
  saving_group_ = make_saving_group(group_, "saves");
}

void TrainingSaves::go_beside_training() {
  saver_ = std::make_unique<AsyncSaver>(group_, AsyncSaverOptions{.say = say_});
}

void TrainingSaves::save() {
  finish();
  say_(saving_line(state_.iteration, *state_.arguments.save, state_.arguments.ckpt_format));
  const auto warn = [this](const std::string& line) { say_("WARNING: " + line); };
  std::erase(state_.damaged_steps, state_.iteration);  // it is replaced
  save_training_checkpoint(state_, saving_group_, warn, saver_.get());
  last_saved_ = being_saved_ = state_.iteration;
  if (saver_ == nullptr) finish();
}

void TrainingSaves::follow(bool failed_on_a_rank) {
  const bool written = saver_ != nullptr && saver_->state() == AsyncSaver::State::kWritten;
  if (written || failed_on_a_rank) finish();
}

void TrainingSaves::finish() {
  if (!being_saved_) return;
  if (saver_ != nullptr) saver_->wait();
  say_(saved_line(*being_saved_, *state_.arguments.save));
  being_saved_.reset();
}

bool TrainingSaves::has_failed() const {
  return saver_ != nullptr && saver_->state() == AsyncSaver::State::kFailed;
}

std::optional<int64_t> TrainingSaves::last_in_folder() const {
  if (last_saved_) return last_saved_;
  return saves_where_it_loads(state_.arguments) ? loaded_ : std::nullopt;
}

bool TrainingSaves::is_saved() const {
  if (was_just_saved()) return true;
  const Arguments& arguments = state_.arguments;
  if (loaded_ != state_.iteration) return false;
  if (arguments.auto_detect_ckpt_format) return false;  // the format may be another one
  // Ranks may see the folders differently: the first rank's view counts.
  const auto views = gather_or_throw(
      group_, [&] { return std::string(saves_where_it_loads(arguments) ? "here" : ""); });
  return !views.front().empty();
}

}  // namespace megashard
