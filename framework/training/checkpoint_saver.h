#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/steps/async_saver.h"
#include "checkpoint/steps/retention.h"
#include "checkpoint/steps/run_lock.h"
#include "framework/training/listener.h"
#include "framework/training/training_checkpoint.h"

namespace megashard {

/// A group of the same ranks, which may wait for each other's disks as long as an AsyncSaver does;
/// `group` itself where there are no others, or no backend for the CPU. Collective.
ProcessGroupPtr make_saving_group(const ProcessGroupPtr& group, const std::string& name);

/// The checkpoints that a training writes to --save, one at a time: training waits for each, or
/// goes on beside it. All but is_best(), has_failed(), was_just_saved() and those of failures are collective.
/// A save that fails on one rank has failed on all; a warning says why, and the older steps stay. Lost ranks are no
/// failed save: c10::DistError is thrown on.
class CheckpointSaver : public Listener {
 public:
  using Say = std::function<void(const std::string& line)>;
  /// `say` takes log lines, `warn` warnings, `failed` why a save has failed, on every rank. `state` must outlive this.
  CheckpointSaver(TrainingState& state, ProcessGroupPtr group, Say say, Say warn, Say failed = {});

  /// That --ckpt-format can hold the state, before time is spent on it.
  void check();
  /// Takes --save for this run, until this is gone, and settles whose steps are saved: those of the
  /// run that was loaded from there, or of a new one, for which a folder with steps of another is
  /// refused unless --overwrite-run or a load from there says that it is meant. `converts`: the
  /// step that was loaded is saved again, as a step of its own run.
  void begin_run(bool converts);
  /// --async-save: from now on training does not wait.
  void enable_async();

  /// Takes --save again where somebody has removed it: another run that has it makes this a failed save.
  /// `best_loss`: once the step is whole it is marked as the best one, with that validation loss.
  void save(std::optional<double> best_loss = std::nullopt);
  /// The step that was saved last, or loaded from --save and is as it was, is the best one; nothing where it is not
  /// there.
  void mark_best(double validation_loss);
  Requests requests(int64_t /*step*/) override { return {.save_failed = has_failed()}; }
  /// Before a step changes weights and state; not collective.
  void gradients_ready(int64_t /*step*/) override {
    if (async_ != nullptr) async_->before_changes();
  }
  /// Ends a save that is written, or has failed on a rank.
  void step_complete(const StepReport& step, const Requests& merged) override;
  /// Waits for the save under way, if there is one.
  void finish();

  /// --save-best, and lower than that of the best step in --save that is of this run, or that it goes on from.
  bool is_best(double validation_loss) const;
  bool has_failed() const;  ///< on this rank, the one under way
  /// Or is being saved.
  bool was_just_saved() const { return last_saved_ == state_.progress.step || being_saved_ == state_.progress.step; }
  int64_t failed_in_a_row() const { return failed_in_a_row_; }
  /// Throws where --max-failed-saves in a row have failed.
  void check_limit() const;
  /// Throws where the last save has failed, for a run that ends.
  void check_last() const;
  /// The state as it is now is that of the step, of --load.
  void note_loaded(const CheckpointStep& step) {
    loaded_ = step;
    loaded_at_ = state_.progress.step;
  }
  const std::optional<CheckpointStep>& loaded() const { return loaded_; }
  /// The last whole step in --save that is of this run, or that it goes on from.
  std::optional<int64_t> last_in_folder() const;
  /// The weights as they are now are a step of --save.
  bool is_saved() const;

 private:
  std::string settle_run(bool converts);
  void warn_of_little_room();
  void find_best();
  void mark(const BestStep& best);
  void keep_folder();
  void start_save();
  void note_failure(const std::string& why);
  std::string newest_whole() const;

  TrainingState& state_;
  ProcessGroupPtr group_;
  Say say_, warn_, failed_;
  std::optional<int64_t> last_saved_, loaded_at_;
  std::optional<CheckpointStep> loaded_;
  std::optional<int64_t> being_saved_;
  std::optional<BestStep> best_;         // of this run
  std::optional<int64_t> marked_;        // in --save, of whatever run
  std::optional<double> loss_of_saved_;  // of being_saved_, where it will be the best one
  bool replaces_damaged_ = false;        // being_saved_ does
  int64_t failed_in_a_row_ = 0;
  std::string failure_;  // of the last save; empty: it went well, or is under way
  ProcessGroupPtr saving_group_;
  std::unique_ptr<RunLock> lock_;      // of the first rank
  std::unique_ptr<AsyncSaver> async_;  // null: training waits for each save
};

}  // namespace megashard
