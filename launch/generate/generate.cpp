#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/argument_value.h"
#include "framework/data/conversation_dataset.h"
#include "framework/training/generation.h"
#include "framework/training/output_paths.h"
#include "framework/training/progress.h"
#include "launch/generate/generated_set.h"
#include "launch/infer/infer_files.h"
#include "launch/infer/inference_run.h"
#include "launch/shell/subcommands.h"
#include "launch/train/end_of_document.h"

namespace megashard {
namespace {

constexpr const char* kOutput = "--output";
constexpr const char* kNewTokens = "--max-new-tokens";
constexpr const char* kTemperature = "--temperature";
constexpr const char* kTopP = "--top-p";
constexpr const char* kTopK = "--top-k";
constexpr const char* kSamples = "--samples-per-prompt";
constexpr const char* kStopTokens = "--stop-token-ids";

const Program& generate_program() {
  static const Program program = {
      .name = "generate",
      .purpose = "megashard generate [FILE.yaml] --data-path PREFIX --output PREFIX [options]\n\n"
                 "Samples answers to prompts, and writes both as a set of conversations with the\n"
                 "log-probability of each sampled token, for --objective policy. A prompt is a\n"
                 "document of a .bin/.idx pair, or what stands before the first answer of a\n"
                 "conversation. Options are those of `megashard pretrain`, also in its YAML\n"
                 "file; what only a training uses is accepted, not listed here and not used.\n"
                 "--micro-batch-size is the answers of one forward, --seed that of the samples.\n"
                 "Defaults are shown in [].\n",
      .flags = {{kOutput, "PREFIX", "of the set: PREFIX.vision.safetensors"},
                {kNewTokens, "INT", "of an answer, at most"},
                {kTemperature, "FLOAT", "divides the logits; 0: the likeliest token each time [1]"},
                {kTopP, "FLOAT", "only the fewest of the likeliest tokens whose probabilities exceed it; 1: all [1]"},
                {kTopK, "INT", "only so many of the likeliest tokens; 0: all [0]"},
                {kSamples, "INT", "answers to each prompt [1]"},
                {kStopTokens, "INT,INT,...",
                 "tokens that end an answer [eos_token_id of the model's generation_config.json or config.json]"}},
      .shown = is_shown_without_training,
      .examples = "  megashard generate --hf-model DIR --data-path prompts --seq-length 512 \\\n"
                  "    --micro-batch-size 16 --max-new-tokens 256 --samples-per-prompt 8 --output answers\n"
                  "  megashard launch -n 2 -- generate run.yaml --load runs/a --data-path prompts \\\n"
                  "    --max-new-tokens 64 --temperature 0 --output answers\n"};
  return program;
}

struct GenerateFlags {
  std::string output;
  GenerationOptions options{};
  int64_t samples = 1;
  bool has_ends = false;  ///< options.ends are --stop-token-ids
};

/// Reads one flag after the other, and notes those that are wrong.
class FlagReader {
 public:
  explicit FlagReader(CommandLine& line) : line_(line) {}

  /// `wanted`: of the values that `fits` accepts, for the message.
  template <class T>
  void read(const char* flag, T& value, std::optional<T> (*parse)(std::string_view), const char* wanted,
            const std::function<bool(T)>& fits) {
    const auto found = line_.own.find(flag);
    if (found == line_.own.end()) return;
    const auto parsed = parse(found->second);
    line_.mistakes.require(parsed && fits(*parsed),
                           std::string(flag) + " takes " + wanted + ", got \"" + found->second + "\".");
    if (parsed) value = *parsed;
  }

 private:
  CommandLine& line_;
};

std::vector<int64_t> stop_tokens(CommandLine& line) {
  std::vector<int64_t> tokens;
  for (const auto& word : comma_words({line.own.at(kStopTokens)})) {
    const auto token = parse_integer(word);
    line.mistakes.require(token && *token >= 0,
                          c10::str(kStopTokens, " takes token ids with commas between them, got \"", word, "\"."));
    if (token) tokens.push_back(*token);
  }
  return tokens;
}

GenerateFlags generate_flags(CommandLine& line) {
  GenerateFlags flags{.output = line.own_value(kOutput, "")};
  auto& sampling = flags.options.sampling;
  FlagReader reader(line);
  line.mistakes.require(line.own.contains(kOutput), "give --output PREFIX, where the answers go.");
  line.mistakes.require(line.own.contains(kNewTokens), "give --max-new-tokens N, the longest answer.");
  const auto at_least = [](int64_t least) { return [least](int64_t value) { return value >= least; }; };
  reader.read<int64_t>(kNewTokens, flags.options.max_new_tokens, parse_integer, "a number of tokens", at_least(1));
  reader.read<int64_t>(kTopK, sampling.top_k, parse_integer, "a number of tokens, or 0 for all", at_least(0));
  reader.read<int64_t>(kSamples, flags.samples, parse_integer, "a number of answers",
                       [](int64_t value) { return value >= 1 && value <= int64_t{1} << 24; });
  reader.read<double>(kTemperature, sampling.temperature, parse_number, "a number from 0 on",
                      [](double value) { return value >= 0 && std::isfinite(value); });
  reader.read<double>(kTopP, sampling.top_p, parse_number, "a number above 0, up to 1",
                      [](double value) { return value > 0 && value <= 1; });
  line.mistakes.require(sampling.temperature > 0 || flags.samples <= 1,
                        c10::str("--temperature 0 gives all ", flags.samples,
                                 " samples of a prompt the same answer; leave out ", kSamples, "."));
  flags.has_ends = line.own.contains(kStopTokens);
  if (flags.has_ends) flags.options.ends = stop_tokens(line);
  return flags;
}

/// Prompts of a set, each taken `samples` times, one after the other.
class PromptRows {
 public:
  PromptRows(const InferDocuments& data, int64_t samples) : data_(data), samples_(samples) {}

  int64_t size() const { return data_.size() * samples_; }
  TextNumber number(int64_t row) const { return {row / samples_, row % samples_}; }
  std::vector<int64_t> prompt(int64_t number) const {
    return data_.prompts(data_.read(number, number + 1), number, PromptEnd::kFirstAnswer).texts.front();
  }
  /// Prompt and answer are a conversation that a training with this --seq-length takes.
  void check_lengths(int64_t new_tokens, int64_t seq_length) const {
    for (int64_t i = 0; i < data_.size(); ++i) {
      const int64_t needed = std::ssize(prompt(i)) + new_tokens - 1;
      TORCH_CHECK(needed <= seq_length, "prompt ", i, " has ", needed + 1 - new_tokens, " tokens, and with ",
                  kNewTokens, " ", new_tokens, " more it is longer than --seq-length and one: give --seq-length ",
                  needed);
    }
  }

 private:
  const InferDocuments& data_;
  int64_t samples_;
};

void check_ends(const std::vector<int64_t>& ends, int64_t vocabulary) {
  for (const int64_t token : ends) {
    if (token >= vocabulary) {
      throw UsageError(c10::str(kStopTokens, " has the token ", token, ", but the model's vocabulary has ", vocabulary,
                                "; give ids of its tokenizer."));
    }
  }
}

void generate_set(const InferenceRun& run, GenerateFlags flags) {
  const Arguments& arguments = run.arguments;
  const std::string& prefix = arguments.data_path.front();
  const InferDocuments data(prefix, *arguments.seq_length, run.model().vocab_size());
  if (data.has_pictures()) {
    throw UsageError(prefix + " has pictures, which generate does not write to its set; give conversations of text, "
                              "or continue these by `megashard infer --generate`.");
  }
  const PromptRows rows(data, flags.samples);
  rows.check_lengths(flags.options.max_new_tokens, *arguments.seq_length);
  if (flags.has_ends) {
    check_ends(flags.options.ends, run.model().vocab_size());
  } else {
    flags.options.ends = end_of_text_ids(arguments);
  }
  flags.options.seed = arguments.seed;
  const std::string path = flags.output + kConversationsSuffix;
  try_output_paths({{kOutput, path, OutputPath::Kind::kFile}}, run.session.groups.world);
  tell_if_recomputed(run);

  const int64_t batch = *arguments.micro_batch_size, at_once = batch * run.readers->size();
  GeneratedSet set(flags.options.sampling.temperature);  // of the first rank
  ProgressClock progress;
  const auto begin = std::chrono::steady_clock::now();
  run.sink(Severity::kNotice, c10::str("Generating ", rows.size(), " answers to ", data.size(), " prompts"));
  for (int64_t start = 0; start < rows.size(); start += at_once) {
    if (progress.is_due()) run.sink(Severity::kNotice, c10::str("Generating: answer ", start, "/", rows.size()));
    const int64_t first = std::min(start + run.readers->rank() * batch, rows.size());
    const int64_t last = std::min(first + batch, rows.size());
    InferenceBatch mine;
    std::vector<TextNumber> numbers;
    for (int64_t row = first; row < last; ++row) {
      numbers.push_back(rows.number(row));
      mine.texts.push_back(rows.prompt(numbers.back().prompt));
    }
    const Generated own = generate(run.model(), mine, numbers, flags.options, run.ranks);
    const auto gathered = [&](const at::Tensor& of_rank) {
      return gather_rows(of_rank, batch, run.readers, run.ranks.device);
    };
    const auto tokens = gathered(own.tokens), log_probs = gathered(own.log_probs), lengths = gathered(own.lengths);
    for (int64_t row = 0; run.is_first() && row < std::min(at_once, rows.size() - start); ++row) {
      const int64_t length = lengths[row].item<int64_t>();
      set.add(rows.prompt(rows.number(start + row).prompt), tokens[row].narrow(0, 0, length),
              log_probs[row].narrow(0, 0, length));
    }
  }
  if (run.is_first()) {
    const auto folder = std::filesystem::path(path).parent_path();
    if (!folder.empty()) std::filesystem::create_directories(folder);
    set.write(path);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  run.sink(Severity::kNotice,
           c10::str(rows.size(), " answers to ", data.size(), " prompts: ", set.answer_tokens(), " tokens, ",
                    std::llround(static_cast<double>(set.answer_tokens()) / seconds.count()), " a second, in ", path));
}

}  // namespace

int run_generate(int argc, char** argv) {
  GenerateFlags flags;
  return run_inference(
      argc, argv, generate_program(), [&](CommandLine& line) { flags = generate_flags(line); },
      [&](const InferenceRun& run) { generate_set(run, flags); });
}

}  // namespace megashard
