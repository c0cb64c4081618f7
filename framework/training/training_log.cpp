#include "framework/training/training_log.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>

#include "framework/arguments/argument_table.h"

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

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

constexpr const char* kRanks = "[ t 1/1, p 1/1 ]";

}  // namespace

std::string log_time(const std::tm& local_time) {
  char buffer[32];
  const size_t length = std::strftime(buffer, sizeof buffer, "%Y-%m-%d %H:%M:%S", &local_time);
  return {buffer, length};
}

std::string training_log_line(const TrainingLogLine& line) {
  std::string text = " [" + line.time + "]";
  text += formatted(" iteration %8lld/%8lld |", wide(line.iteration), wide(line.train_iters));
  text += formatted(" consumed samples: %12lld |", wide(line.consumed_samples));
  text += formatted(" elapsed time per iteration (ms): %.1f |", line.milliseconds_per_iteration);
  if (line.tflops_per_device)
    text += formatted(" throughput per GPU (TFLOP/s/GPU): %.1f |", *line.tflops_per_device);
  text += formatted(" learning rate: %.6E |", line.learning_rate);
  text += formatted(" global batch size: %5lld |", wide(line.global_batch_size));
  for (const auto& [name, loss] : line.losses) {
    if (!(loss <= 0.0)) text += " " + name + formatted(": %.6E |", loss);
  }
  if (line.tokens_per_sample)
    text += formatted(" tokens per sample: %.6E |", *line.tokens_per_sample);
  text += " loss scale: 1.0 |";  // there is no loss scaling here, nor iterations that it skips
  if (line.grad_norm) text += formatted(" grad norm: %.3f |", *line.grad_norm);
  if (line.zeros_in_grad) text += formatted(" num zeros: %.1f |", *line.zeros_in_grad);
  if (line.params_norm) text += formatted(" params norm: %.3f |", *line.params_norm);
  text += " number of skipped iterations:   0 |";
  text += formatted(" number of nan iterations: %3lld |", wide(line.nan_iterations));
  return text;
}

std::string evaluation_log_lines(const std::string& where,
                                 const std::vector<std::pair<std::string, double>>& losses) {
  constexpr double kLargestExponent = 20.0;
  std::string text = " validation loss at " + where + " | ";
  for (const auto& [name, loss] : losses) {
    text += name + formatted(" value: %.6E | ", loss);
    text += name + formatted(" PPL: %.6E | ", std::exp(std::min(kLargestExponent, loss)));
  }
  const std::string dashes(text.size() + 1, '-');
  return dashes + "\n" + text + "\n" + dashes;
}

std::string sizes_line(const Arguments& arguments) {
  return "using world size: " + std::to_string(arguments.world_size) +
         ", data-parallel size: " + std::to_string(arguments.data_parallel_size) +
         ", context-parallel size: " + std::to_string(arguments.context_parallel_size) +
         ", tensor-model-parallel size: " + std::to_string(arguments.tensor_model_parallel_size) +
         ", pipeline-model-parallel size: " +
         std::to_string(arguments.pipeline_model_parallel_size);
}

std::string arguments_banner(const Arguments& arguments) {
  constexpr size_t kNameWidth = 48;
  std::vector<std::string> lines;
  for (const auto& [name, value] : argument_values(arguments)) {
    const std::string dots(kNameWidth - std::min(kNameWidth, name.size()), '.');
    lines.push_back("  " + name + " " + dots + " " + argument_text(value));
  }
  std::sort(lines.begin(), lines.end(),
            [](const auto& a, const auto& b) { return lower(a) < lower(b); });
  std::string text = "------------------------ arguments ------------------------\n";
  for (const auto& line : lines) text += line + "\n";
  return text + "-------------------- end of arguments ---------------------";
}

std::string padded_vocab_line(int64_t vocab_size, int64_t padded_size) {
  return " > padded vocab (size: " + std::to_string(vocab_size) + ") with " +
         std::to_string(padded_size - vocab_size) +
         " dummy tokens (new size: " + std::to_string(padded_size) + ")";
}

std::string datetime_line(const std::string& after_what, const std::string& time) {
  return "[" + after_what + "] datetime: " + time + " ";
}

std::string parameter_count_line(int64_t parameters) {
  return " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): " +
         std::to_string(parameters);
}

std::string exit_line(int64_t iteration, const std::string& time) {
  return datetime_line("exiting program at iteration " + std::to_string(iteration), time);
}

std::string saving_line(int64_t iteration, const std::string& directory,
                        const std::string& format) {
  return formatted("saving checkpoint at iteration %7lld to ", wide(iteration)) + directory +
         " in " + format + " format";
}

std::string saved_line(int64_t iteration, const std::string& directory) {
  return formatted("  successfully saved checkpoint from iteration %7lld to ", wide(iteration)) +
         directory + " " + kRanks;
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
         (weights.empty()
              ? "\n    will not load any checkpoints and will start from random"
              : "\n    will not load any checkpoints from there; the weights come from " + weights);
}

}  // namespace megashard
