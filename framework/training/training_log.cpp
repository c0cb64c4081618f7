#include "framework/training/training_log.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace megashard {

namespace {

template <class... Values>
std::string formatted(const char* format, Values... values) {
  const int length = std::snprintf(nullptr, 0, format, values...);
  std::string text(static_cast<size_t>(length) + 1, '\0');
  std::snprintf(text.data(), text.size(), format, values...);
  text.pop_back();
  return text;
}

long long wide(int64_t value) { return value; }

constexpr const char* kRanks = "[ t 1/1, p 1/1 ]";

}  // namespace

std::string log_time(const std::tm& local_time) {
  char buffer[32];
  const size_t length = std::strftime(buffer, sizeof buffer, "%Y-%m-%d %H:%M:%S", &local_time);
  return {buffer, length};
}

std::string log_time_now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  localtime_r(&seconds, &local);
  return log_time(local);
}

std::string training_log_line(const std::string& time, const StepReport& report, const LoggingArguments& log) {
  std::string line = " [" + time + "]";
  line += formatted(" iteration %8lld/%8lld |", wide(report.iteration), wide(report.train_iters));
  const auto add = [&line](const Metric& metric, double value) {
    if (metric.text != nullptr) line += formatted(metric.text, value);
  };
  for_each_metric(report, add, &log);
  return line;
}

std::string timer_log_lines(const PartTimes& times, TimingLogOption option) {
  std::string text;
  for (const auto& [name, ranks] : times) {
    const auto [least, most] = std::minmax_element(ranks.begin(), ranks.end());
    if (*most <= 0) continue;
    if (option == TimingLogOption::kAll) {
      text += "\n  " + name + ":";
      for (size_t rank = 0; rank < ranks.size(); ++rank) text += formatted("\n     rank %2zu: %.2f", rank, ranks[rank]);
      continue;
    }
    constexpr size_t kWidth = 48;
    std::string dotted = name + " ";
    dotted.resize(std::max(kWidth, dotted.size()), '.');
    text += "\n    " + dotted +
            (option == TimingLogOption::kMax ? formatted(": %.2f", *most) : formatted(": (%.2f, %.2f)", *least, *most));
  }
  if (text.empty()) return text;
  const std::string head = option == TimingLogOption::kAll   ? "times"
                           : option == TimingLogOption::kMax ? "max time"
                                                             : "(min, max) time";
  return head + " across ranks (ms):" + text;
}

std::string evaluation_log_lines(const std::string& where, const std::vector<std::pair<std::string, double>>& metrics) {
  constexpr double kLargestExponent = 20.0;
  std::string text = " validation loss at " + where + " | ";
  for (size_t i = 0; i < metrics.size(); ++i) {
    const auto& [name, value] = metrics[i];
    text += name + formatted(" value: %.6E | ", value);
    if (i == 0) text += name + formatted(" PPL: %.6E | ", std::exp(std::min(kLargestExponent, value)));
  }
  const std::string dashes(text.size() + 1, '-');
  return dashes + "\n" + text + "\n" + dashes;
}

std::string datetime_line(const std::string& after_what, const std::string& time) {
  return "[" + after_what + "] datetime: " + time + " ";
}

std::string evaluating_line(int64_t samples) { return "Evaluating on " + std::to_string(samples) + " samples"; }

std::string evaluation_progress_line(int64_t iteration, int64_t iterations) {
  return "Evaluating iter " + std::to_string(iteration) + "/" + std::to_string(iterations);
}

std::string interruption_line(const Interruption& interruption) {
  const auto& [iteration, train_iters, in_evaluation, save, saved_step] = interruption;
  const std::string where = std::string("interrupted by SIGINT ") + (in_evaluation ? "in an evaluation " : "") +
                            "after iteration " + std::to_string(iteration) + " of " + std::to_string(train_iters) +
                            ": ";
  if (!save) return where + "nothing is saved, since there is no --save";
  if (!saved_step) return where + "nothing is saved in " + *save + " yet";
  return where + "iteration " + std::to_string(*saved_step) + " is saved in " + *save + "; go on with --load " + *save;
}

std::string unlearnt_batch_line() {
  return "every label of this iteration's batch is masked: nothing is learnt from it, and it has no loss; how many "
         "such "
         "iterations there are is told at the end";
}

std::string unlearnt_steps_line(int64_t unlearnt, int64_t steps) {
  return "nothing was learnt in " + std::to_string(unlearnt) + " of the " + std::to_string(steps) +
         " iterations of this run: every label of their batches is masked";
}

std::string exit_line(int64_t iteration, const std::string& time) {
  return datetime_line("exiting program at iteration " + std::to_string(iteration), time);
}

std::string saving_line(int64_t iteration, const std::string& directory, const std::string& format) {
  return formatted("saving checkpoint at iteration %7lld to ", wide(iteration)) + directory + " in " + format +
         " format";
}

std::string saved_line(int64_t iteration, const std::string& directory) {
  return formatted("  successfully saved checkpoint from iteration %7lld to ", wide(iteration)) + directory + " " +
         kRanks;
}

std::string best_line(int64_t iteration, double validation_loss) {
  return formatted("  the best checkpoint so far is that of iteration %7lld, with the validation loss %.6E",
                   wide(iteration), validation_loss);
}

std::string loading_line(const std::string& directory, std::optional<int64_t> iteration) {
  const std::string text = " loading distributed checkpoint from " + directory;
  return iteration ? text + " at iteration " + std::to_string(*iteration)
                   : " loading release checkpoint from " + directory;
}

std::string loaded_line(const std::string& directory, int64_t iteration) {
  return "  successfully loaded checkpoint from " + directory + " " + kRanks + " at iteration " +
         std::to_string(iteration);
}

std::string missing_checkpoint_lines(const std::string& tracker_file, const std::string& weights) {
  return "WARNING: could not find the metadata file " + tracker_file +
         (weights.empty() ? "\n    will not load any checkpoints and will start from random"
                          : "\n    will not load any checkpoints from there; the weights come from " + weights);
}

}  // namespace megashard
