#include "framework/training/step_reader.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "framework/training/training_log.h"

namespace megashard {
namespace {

void add_to(std::vector<double>& sums, const std::vector<double>& values) {
  sums.resize(std::max(sums.size(), values.size()));
  for (size_t i = 0; i < values.size(); ++i) sums[i] += values[i];
}

}  // namespace

StepReader::StepReader(const Arguments& arguments, ProcessGroupPtr world, c10::Device device, bool is_scaled,
                       DiagnosticSink sink, Fail fail)
    : arguments_(arguments),
      rank_(static_cast<size_t>(world->rank())),
      is_scaled_(is_scaled),
      sink_(std::move(sink)),
      fail_(std::move(fail)),
      stats_(std::move(world), device) {}

void StepReader::add(const DeviceStats& of_device, const HostStats& of_host, const std::vector<std::string>& names,
                     int64_t batch) {
  stats_.add(of_device, of_host);
  names_ = names;
  batches_.push_back(batch);
}

void StepReader::merge(const HostStats& of_rank) {
  merged_.stop = std::max(merged_.stop, of_rank.stop_request);
  merged_.requests |= of_rank.requests;
}

StepReader::Merged StepReader::take_merged() { return std::exchange(merged_, {}); }

StepSummary StepReader::summarise(const StepOfRanks& step) const {
  StepSummary summary;
  std::vector<RankStats::Mean> means(step.front().metrics.size());
  for (size_t rank = 0; rank < step.size(); ++rank) {
    const RankStats& of_rank = step[rank];
    const bool has_own_tokens = rank % static_cast<size_t>(arguments_.tensor_model_parallel_size) == 0;
    for (size_t i = 0; has_own_tokens && i < means.size(); ++i) {
      means[i].sum += of_rank.metrics[i].sum;
      means[i].count += of_rank.metrics[i].count;
    }
    if (const double loss = of_rank.metrics.front().sum;
        arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(loss)) {
      fail_(c10::str("the loss of rank ", rank, " is ", loss), NotFinite::kLoss,
            ": lower the learning rate, or look at the batch; "
            "--no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    reduce_metrics(summary.measures, of_rank.host.measures);
  }
  summary.terms = means.front().count;
  summary.has_loss = summary.terms > 0;
  summary.loss = summary.has_loss ? means.front().sum / summary.terms : 0;
  for (size_t i = 1; i < means.size(); ++i)
    summary.further.push_back(means[i].count > 0 ? means[i].sum / means[i].count : std::nan(""));
  const RankStats& mine = step[rank_];
  summary.grad_norm = mine.grad_norm;
  if (!is_scaled_) return summary;
  summary.skipped = !std::isfinite(mine.grad_norm);
  summary.loss_scale = mine.loss_scale;
  return summary;
}

void StepReader::add_to_interval(const StepSummary& step, int64_t samples) {
  if (!step.has_loss) {
    ++interval_.unlearnt_steps;
    if (unlearnt_steps_++ == 0 && sink_) sink_(Severity::kWarning, unlearnt_batch_line());
  }
  const bool is_number = std::isfinite(step.loss);
  if (is_number && step.has_loss && !step.skipped) {
    interval_.loss_sum += step.loss;
    ++interval_.losses;
    add_to(interval_.further_sums, step.further);
  }
  if (!is_number) ++interval_.nan_steps;
  if (step.skipped) ++interval_.skipped_steps;
  interval_.tokens_per_sample += step.terms / static_cast<double>(samples);
}

void StepReader::read(const std::function<void(int64_t samples)>& learnt) {
  const auto steps = stats_.finish_read();
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const RankStats& rank : steps[i]) merge(rank.host);
    last_ = summarise(steps[i]);
    if (arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(last_.grad_norm)) {
      fail_(c10::str("the norm of the gradients is ", last_.grad_norm), NotFinite::kNorm,
            ", and the loss is finite: lower the learning rate, or look at the batch and the "
            "layers' backward; --no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    ++steps_;
    add_to_interval(last_, batches_[i]);
    if (!last_.skipped) learnt(batches_[i]);
  }
  batches_.clear();
}

void StepReader::warn_of_unlearnt_steps() const {
  if (unlearnt_steps_ > 0 && sink_) sink_(Severity::kWarning, unlearnt_steps_line(unlearnt_steps_, steps_));
}

}  // namespace megashard
