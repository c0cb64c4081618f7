#include "framework/training/start_log.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <vector>

#include "framework/arguments/argument_table.h"

namespace megashard {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// Two digits behind the point.
std::string decimal(double value) {
  char buffer[64];
  return {buffer, static_cast<size_t>(std::snprintf(buffer, sizeof buffer, "%.2f", value))};
}

std::string counted(int64_t number, const std::string& unit) {
  return std::to_string(number) + " " + unit + (number == 1 ? "" : "s");
}

}  // namespace

std::string sizes_line(const Arguments& arguments) {
  return "using world size: " + std::to_string(arguments.world_size) +
         ", data-parallel size: " + std::to_string(arguments.data_parallel_size) +
         ", context-parallel size: " + std::to_string(arguments.context_parallel_size) +
         ", tensor-model-parallel size: " + std::to_string(arguments.tensor_model_parallel_size) +
         ", pipeline-model-parallel size: " + std::to_string(arguments.pipeline_model_parallel_size);
}

std::string arguments_banner(const Arguments& arguments) {
  constexpr size_t kNameWidth = 48;
  const bool all = arguments.print_all_arguments;
  const auto defaults = argument_values(Arguments());
  std::vector<std::string> lines;
  for (const auto& named : argument_values(arguments)) {
    const auto& [name, value] = named;
    if (!all && std::find(defaults.begin(), defaults.end(), named) != defaults.end()) continue;
    const std::string dots(kNameWidth - std::min(kNameWidth, name.size()), '.');
    lines.push_back("  " + name + " " + dots + " " + argument_text(value));
  }
  std::sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return lower(a) < lower(b); });
  std::string text = all ? "------------------------ arguments ------------------------\n"
                         : "--- arguments that differ from their defaults; --print-all-arguments shows all ---\n";
  for (const auto& line : lines) text += line + "\n";
  return text + "-------------------- end of arguments ---------------------";
}

std::string padded_vocab_line(int64_t vocab_size, int64_t padded_size) {
  return " > padded vocab (size: " + std::to_string(vocab_size) + ") with " + std::to_string(padded_size - vocab_size) +
         " dummy tokens (new size: " + std::to_string(padded_size) + ")";
}

std::string parameter_count_line(int64_t parameters) {
  return " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): " + std::to_string(parameters);
}

std::string trainable_parameters_line(int64_t trainable, int64_t parameters) {
  const double share = 100.0 * static_cast<double>(trainable) / static_cast<double>(std::max<int64_t>(1, parameters));
  return " > trainable parameters: " + std::to_string(trainable) + " (" + decimal(share) + "%) of " +
         std::to_string(parameters);
}

std::string data_line(const std::string& split, const SampleDataset* dataset, int64_t samples, int64_t seq_length) {
  const std::string start = " > " + split + " data: ";
  if (dataset == nullptr) return start + "not read";
  DatasetFacts facts;
  dataset->add_facts(samples, facts);
  const std::string least = decimal(facts.min_epochs), most = decimal(facts.max_epochs);
  std::string holds;
  for (const auto& [unit, count] : facts.units) holds += counted(count, unit) + ", ";
  return start + holds + counted(facts.tokens, facts.entry) + "; asked for: " + counted(samples, "sample") +
         (facts.has_fixed_length ? " of " + counted(seq_length, facts.entry) : "") + ", " +
         (least == most ? "" : least + " to ") + most + " epochs";
}

}  // namespace megashard
