#include <algorithm>
#include <map>
#include <optional>

#include "framework/arguments/argument_value.h"
#include "framework/training/generation.h"
#include "framework/training/output_paths.h"
#include "framework/training/progress.h"
#include "launch/infer/infer_files.h"
#include "launch/infer/infer_latents.h"
#include "launch/infer/inference_run.h"
#include "launch/shell/subcommands.h"
#include "launch/train/end_of_document.h"

namespace megashard {
namespace {

constexpr const char* kLogProbs = "--log-probs";
constexpr const char* kInto = "--into";
constexpr const char* kScores = "--scores";
constexpr const char* kGenerate = "--generate";
constexpr const char* kGenerated = "--generated";

Program make_infer_program() {
  Program program = {
      .name = "infer",
      .purpose = "megashard infer [FILE.yaml] --data-path PREFIX [options]\n\n"
                 "Runs a model over each document of a .bin/.idx pair, or each conversation with\n"
                 "pictures of PREFIX.vision.safetensors, without training it. Options are those\n"
                 "of `megashard pretrain`, also in its YAML file; what only a training uses is\n"
                 "accepted, not listed here and not used. --micro-batch-size is the documents of\n"
                 "one forward. A model of latents runs over the samples of a folder of features.\n"
                 "Defaults are shown in [].\n",
      .flags = {{kLogProbs, "FILE.npy", "log-probability of each token given those before it: [documents, seq-length]"},
                {kInto, "COLUMN",
                 "the same, as a column of the conversations of --data-path: ref_log_probs is what preference "
                 "losses read"},
                {kScores, "FILE.npy", "the score of each text by a reward model: [documents, 1]"},
                {kGenerate, "INT",
                 "continue each document by so many likeliest tokens, one by one; of a "
                 "conversation what comes before its last answer"},
                {kGenerated, "FILE.npy", "where to: [documents, number of --generate]"}},
      .shown = is_shown_without_training,
      .examples = "  megashard infer --hf-model DIR --data-path data --log-probs out.npy\n"
                  "  megashard infer --hf-model REFERENCE --data-path pairs --into ref_log_probs\n"
                  "  megashard infer --hf-model REWARD_MODEL --data-path data --scores out.npy\n"
                  "  megashard infer run.yaml --load runs/a --generate 64 --generated out.npy\n"
                  "  megashard infer --hf-model WAN --data-path clips --latents out \\\n"
                  "    --guidance-scale 5\n"};
  const auto more = latent_flags();
  program.flags.insert(program.flags.end(), more.begin(), more.end());
  return program;
}

const Program& infer_program() {
  static const Program program = make_infer_program();
  return program;
}

struct InferFlags {
  std::optional<std::string> log_probs, into, scores, generated;
  int64_t new_tokens = 0;  // of --generate
  LatentOutputs latents{};
};

InferFlags infer_flags(const std::map<std::string, std::string>& own, Mistakes& mistakes) {
  const auto value = [&own](const char* flag) {
    const auto found = own.find(flag);
    return found == own.end() ? std::nullopt : std::optional(found->second);
  };
  InferFlags flags{value(kLogProbs), value(kInto), value(kScores), value(kGenerated)};
  flags.latents = latent_outputs(own, mistakes);
  const auto number = value(kGenerate);
  mistakes.require(number.has_value() == flags.generated.has_value(),
                   "--generate N and --generated FILE.npy belong together; give both.");
  mistakes.require(
      flags.log_probs || flags.into || flags.scores || flags.generated || number || flags.latents.is_asked(),
      "there is nothing to do; give --log-probs FILE.npy, --into COLUMN, --scores FILE.npy, --generate N, "
      "--latents DIR or --velocities DIR.");
  if (!number) return flags;
  flags.new_tokens = parse_integer(*number).value_or(0);
  mistakes.require(flags.new_tokens >= 1, "--generate takes a number of tokens, got \"" + *number + "\".");
  return flags;
}

void infer(const InferenceRun& run, const InferFlags& flags) {
  const Arguments& arguments = run.arguments;
  const DiagnosticSink& sink = run.sink;
  MultiModalModule& model = run.model();
  const bool takes_latents = model.latent_patches().has_value();
  require(takes_latents == flags.latents.is_asked(),
          takes_latents ? "the model takes latents; give --latents DIR or --velocities DIR."
                        : "the model takes tokens; --latents and --velocities are for models of latents.");
  if (takes_latents) return infer_latents(run, flags.latents);
  const InferDocuments data(arguments.data_path.front(), *arguments.seq_length, model.vocab_size());
  const int64_t documents = data.size();
  if (flags.into && !data.has_conversations()) {
    throw UsageError("--into " + *flags.into + " writes a column of a set of conversations, and " +
                     arguments.data_path.front() + " has documents; give --log-probs FILE.npy.");
  }
  std::vector<OutputPath> outputs;
  if (flags.into)
    outputs.push_back({"--into", arguments.data_path.front() + kConversationsSuffix, OutputPath::Kind::kFile});
  if (flags.log_probs) outputs.push_back({"--log-probs", *flags.log_probs, OutputPath::Kind::kFile});
  if (flags.scores) outputs.push_back({"--scores", *flags.scores, OutputPath::Kind::kFile});
  if (flags.generated) outputs.push_back({"--generated", *flags.generated, OutputPath::Kind::kFile});
  try_output_paths(outputs, run.session.groups.world);
  const ProcessGroupPtr& readers = run.readers;
  const c10::Device device = run.ranks.device;
  const int64_t batch = *arguments.micro_batch_size, length = *arguments.seq_length;
  const GenerationOptions greedy{
      .max_new_tokens = flags.new_tokens, .sampling = {.temperature = 0}, .ends = end_of_text_ids(arguments)};
  std::optional<NpyFile> log_probs, of_texts, generated;
  if (run.is_first() && flags.log_probs) log_probs.emplace(*flags.log_probs, at::kFloat, length);
  if (run.is_first() && flags.scores) of_texts.emplace(*flags.scores, at::kFloat, 1);
  if (run.is_first() && flags.generated) generated.emplace(*flags.generated, at::kLong, flags.new_tokens);
  at::Tensor column;  // a value for each token of the set
  int64_t filled = 0;
  if (run.is_first() && flags.into) column = at::zeros({data.tokens()});
  double sum = 0;
  sink(Severity::kNotice, c10::str("Inferring on ", documents, " documents"));
  if (flags.generated) tell_if_recomputed(run);
  ProgressClock progress;
  for (int64_t start = 0; start < documents; start += batch * readers->size()) {
    const int64_t first = std::min(start + readers->rank() * batch, documents);
    const int64_t last = std::min(first + batch, documents);
    if (progress.is_due()) sink(Severity::kNotice, c10::str("Inferring: document ", start, "/", documents));
    InferenceBatch mine = data.read(first, last);
    const int64_t rows = std::min(documents - start, batch * readers->size());
    if (flags.log_probs || flags.into) {
      const auto own = log_probabilities(model, mine, length, run.ranks);
      const auto all = gather_rows(own, batch, readers, device).narrow(0, 0, rows);
      if (log_probs) log_probs->append(all);
      for (int64_t row = 0; column.defined() && row < rows; ++row) {
        const int64_t tokens = data.tokens_of(start + row);
        column.narrow(0, filled + 1, tokens - 1).copy_(all[row].narrow(0, 0, tokens - 1));
        filled += tokens;
      }
      sum += all.sum(at::kDouble).item<double>();
    }
    if (flags.scores) {
      const auto all = gather_rows(scores(model, mine, run.ranks), batch, readers, device).narrow(0, 0, rows);
      if (of_texts) of_texts->append(all);
    }
    if (flags.generated) {
      const auto prompts = data.prompts(std::move(mine), first, PromptEnd::kLastAnswer);
      const auto own = generate(model, prompts, {}, greedy, run.ranks);
      const auto all = gather_rows(own.tokens, batch, readers, device).narrow(0, 0, rows);
      if (generated) generated->append(all);
    }
  }
  if (log_probs) log_probs->finish();
  if (column.defined()) write_column(arguments.data_path.front(), *flags.into, column);
  if (flags.log_probs || flags.into) {
    const std::string where = flags.log_probs ? *flags.log_probs : "column " + *flags.into + " of the data";
    sink(Severity::kNotice, c10::str("log-probabilities of ", documents, " documents: mean ",
                                     sum / static_cast<double>(data.tokens() - documents), " a token, in ", where));
  }
  if (of_texts) {
    of_texts->finish();
    sink(Severity::kNotice, c10::str("scores of ", documents, " documents, in ", *flags.scores));
  }
  if (generated) {
    generated->finish();
    sink(Severity::kNotice,
         c10::str(flags.new_tokens, " tokens after each of ", documents, " documents, in ", *flags.generated));
  }
}

}  // namespace

int run_infer(int argc, char** argv) {
  InferFlags flags;
  return run_inference(
      argc, argv, infer_program(), [&](CommandLine& line) { flags = infer_flags(line.own, line.mistakes); },
      [&](const InferenceRun& run) { infer(run, flags); });
}

}  // namespace megashard
