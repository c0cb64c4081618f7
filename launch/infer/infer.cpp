#include "launch/infer/infer.h"

#include <algorithm>
#include <charconv>
#include <iostream>
#include <map>

#include "framework/arguments/checkpoint_arguments.h"
#include "framework/training/finite_weights.h"
#include "framework/training/lr_schedule.h"
#include "framework/training/progress_clock.h"
#include "framework/training/sequence_group.h"
#include "framework/training/training_checkpoint.h"
#include "launch/arguments/command_line.h"
#include "launch/infer/infer_documents.h"
#include "launch/infer/npy_file.h"
#include "launch/train/end_of_document.h"
#include "launch/train/run_setup.h"
#include "models/hugging_face/load_hf_weights.h"
#include "models/network_arguments.h"
#include "models/vision/qwen_vl_model.h"

namespace megashard {
namespace {

constexpr const char* kInferHelp =
    "megashard infer [--config FILE.yaml --role NAME] --data-path PREFIX [flags]\n\n"
    "Runs a model over each document of a .bin/.idx pair, or each conversation with pictures of\n"
    "PREFIX.vision.safetensors, without training it. Flags of the model, of FSDP2 and of\n"
    "checkpoints are those of `megashard pretrain --help`; --micro-batch-size is the documents of "
    "one forward.\n\n"
    "  --log-probs FILE.npy\n      log-probability of each token given those before it: "
    "[documents, seq-length]\n"
    "  --generate N\n      continue each document by its N likeliest tokens, one by one;\n"
    "      of a conversation what comes before its last answer\n"
    "  --generated FILE.npy\n      where to: [documents, N]\n";

constexpr const char* kEveryDocument = "1,0,0";  // as a split

struct InferFlags {
  std::optional<std::string> log_probs, generate, generated;
  int64_t new_tokens = 0;  // of --generate
};

/// Takes infer's own flags out of the words.
InferFlags take_infer_flags(std::vector<const char*>& words) {
  InferFlags flags;
  const std::map<std::string, std::optional<std::string>*> known = {
      {"--log-probs", &flags.log_probs},
      {"--generate", &flags.generate},
      {"--generated", &flags.generated}};
  std::vector<const char*> rest;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string word = words[i];
    if (word == "--help" || word == "-h") throw HelpRequested(kInferHelp);
    const auto equals = word.find('=');
    std::string name = word.substr(0, equals);
    if (name.starts_with("--")) std::replace(name.begin(), name.end(), '_', '-');
    const auto found = known.find(name);
    if (found == known.end()) {
      rest.push_back(words[i]);
      continue;
    }
    if (found->second->has_value()) throw UsageError(name + " is given twice; give it once.");
    if (equals == std::string::npos && i + 1 == words.size())
      throw UsageError(name + " has no value.");
    *found->second = equals == std::string::npos ? words[++i] : word.substr(equals + 1);
  }
  if (flags.generate.has_value() != flags.generated.has_value())
    throw UsageError("--generate N and --generated FILE.npy belong together; give both.");
  if (!flags.log_probs && !flags.generated)
    throw UsageError("there is nothing to do; give --log-probs FILE.npy or --generate N.");
  if (flags.generate) {
    const auto& text = *flags.generate;
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), flags.new_tokens);
    if (error != std::errc() || end != text.data() + text.size() || flags.new_tokens < 1)
      throw UsageError("--generate takes a number of tokens, got \"" + text + "\".");
  }
  words = rest;
  return flags;
}

/// The flags of training that validation asks for and nothing here uses.
void leave_training_out(Arguments& arguments, std::optional<RollWorker>& worker,
                        const DiagnosticSink& sink) {
  arguments.skip_train = true;
  arguments.train_iters = 1;
  arguments.train_samples.reset();
  // What a batch and the schedule of one step cannot be.
  const Arguments defaults;
  arguments.global_batch_size.reset();
  arguments.rampup_batch_size.clear();
  arguments.lr_decay_style = defaults.lr_decay_style;
  arguments.lr_decay_iters.reset();
  arguments.lr_decay_samples.reset();
  arguments.lr_wsd_decay_iters.reset();
  arguments.lr_wsd_decay_samples.reset();
  arguments.lr_warmup_fraction.reset();
  arguments.lr_warmup_iters = arguments.lr_warmup_samples = 0;
  arguments.save.reset();
  arguments.async_save = false;
  if (arguments.split) {
    sink(Severity::kWarning, "--split " + *arguments.split +
                                 " is not used: infer reads every document of --data-path.");
  }
  arguments.split = kEveryDocument;
  arguments.finetune = arguments.load || arguments.pretrained_checkpoint;  // weights only
  if (!worker) {
    if (!arguments.micro_batch_size) arguments.micro_batch_size = 1;
    return;
  }
  if (!arguments.is_given("micro_batch_size"))
    arguments.micro_batch_size = worker->infer_batch_size;
  // As ROLL loads a model that is not trained; a worker of fsdp2_train keeps fp32.
  const bool half = worker->sharding.mixed_precision.param_dtype == at::kBFloat16;
  arguments.bf16 = arguments.bf16 || (half && !worker->trains);
  worker->trains = false;
}

/// The loss that such a model gives for a token is no log-probability.
void refuse_balance_loss(const MultiModalModule& model) {
  const auto* text = dynamic_cast<const DecoderModel*>(&model);
  const auto* sees = dynamic_cast<const QwenVlModel*>(&model);
  if (text == nullptr && sees == nullptr) return;
  const auto& moe = (text != nullptr ? text->config() : sees->config().text).moe;
  if (moe.num_experts == 0 || moe.aux_loss_coef == 0) return;
  throw UsageError(
      "--log-probs does not go with output_router_logits in config.json, which adds the "
      "load-balancing loss to each token's; set it to false there.");
}

/// All ranks' rows on rank 0, in the order of the ranks; others get them too.
at::Tensor gather_rows(const at::Tensor& mine, int64_t rows, const ProcessGroupPtr& group,
                       c10::Device device) {
  at::Tensor all = at::zeros({group->size() * rows, mine.size(1)}, mine.options().device(device));
  const at::Tensor own = all.narrow(0, group->rank() * rows, rows);
  own.narrow(0, 0, mine.size(0)).copy_(mine);
  if (group->size() > 1) group->all_gather_into(all, own).wait();
  return all.cpu();
}

void infer(MultiModalModule& model, const Arguments& arguments, const InferFlags& flags,
           const ProcessGroupPtr& group, c10::Device device, const DiagnosticSink& sink) {
  const InferDocuments data(arguments.data_path.front(), *arguments.seq_length, model.vocab_size());
  const int64_t documents = data.size();
  if (flags.log_probs) refuse_balance_loss(model);
  const InferenceRanks ranks{.device = device,
                             .sequence_group = sequence_group(arguments, model, group)};
  const ProcessGroupPtr readers = data_parallel_group(arguments, group);
  const int64_t batch = *arguments.micro_batch_size, length = *arguments.seq_length;
  const std::vector<int64_t> ends = end_of_text_ids(arguments);
  std::optional<NpyFile> log_probs, generated;
  if (group->rank() == 0 && flags.log_probs)
    log_probs.emplace(*flags.log_probs, at::kFloat, length);
  if (group->rank() == 0 && flags.generated)
    generated.emplace(*flags.generated, at::kLong, flags.new_tokens);
  double sum = 0;
  model.eval();
  sink(Severity::kNotice, c10::str("Inferring on ", documents, " documents"));
  ProgressClock progress;
  for (int64_t start = 0; start < documents; start += batch * readers->size()) {
    const int64_t first = std::min(start + readers->rank() * batch, documents);
    const int64_t last = std::min(first + batch, documents);
    if (progress.is_due())
      sink(Severity::kNotice, c10::str("Inferring: document ", start, "/", documents));
    InferenceBatch mine = data.read(first, last);
    const int64_t rows = std::min(documents - start, batch * readers->size());
    if (flags.log_probs) {
      const auto own = log_probabilities(model, mine, length, ranks);
      const auto all = gather_rows(own, batch, readers, device).narrow(0, 0, rows);
      if (log_probs) log_probs->append(all);
      sum += all.sum(at::kDouble).item<double>();
    }
    if (flags.generated) {
      const auto own = greedy_continuations(model, data.prompts(std::move(mine), first),
                                            flags.new_tokens, ends, ranks);
      const auto all = gather_rows(own, batch, readers, device).narrow(0, 0, rows);
      if (generated) generated->append(all);
    }
  }
  if (log_probs) {
    log_probs->finish();
    sink(Severity::kNotice, c10::str("log-probabilities of ", documents, " documents: mean ",
                                     sum / static_cast<double>(data.tokens() - documents),
                                     " a token, in ", *flags.log_probs));
  }
  if (generated) {
    generated->finish();
    sink(Severity::kNotice, c10::str(flags.new_tokens, " tokens after each of ", documents,
                                     " documents, in ", *flags.generated));
  }
}

void load_weights(Arguments& arguments, const Start& from, MultiModalModule& model,
                  const ProcessGroupPtr& group, c10::Device device) {
  if (from.source == WeightSource::kHuggingFace || arguments.lora_r)
    load_hf_weights(model, *arguments.hf_model);
  if (from.source != WeightSource::kCheckpoint) return;
  OptimizerParamScheduler schedule(lr_schedule_options(arguments));
  TrainingState state{arguments, model, nullptr, &schedule, device};
  load_training_checkpoint(state, from.step, group);
}

/// What a model makes of weights that are no numbers looks like any other tokens.
void check_weights(const MultiModalModule& model, const Arguments& arguments, const Start& from,
                   const ProcessGroupPtr& group) {
  if (from.source == WeightSource::kInitialisation) return;
  const std::string found = weights_without_numbers(model, group);
  const std::string step =
      from.source == WeightSource::kCheckpoint ? from.step.folder : *arguments.hf_model;
  const std::string base = arguments.lora_r ? " and " + *arguments.hf_model : "";
  TORCH_CHECK(found.empty(), "of the weights loaded from ", step, base, ", ", found,
              "; take other files, or convert these again");
}

}  // namespace

int run_infer(int argc, char** argv) {
  std::vector<const char*> words(argv, argv + argc);
  InferFlags flags;
  CommandLine line;
  try {
    flags = take_infer_flags(words);
    line = parse_arguments(static_cast<int>(words.size()), words.data());
  } catch (const HelpRequested& help) {
    std::cout << help.what();
    return 0;
  }
  Arguments& arguments = line.arguments;
  const RendezvousOptions environment = read_environment(arguments.local_rank).rendezvous;
  const DiagnosticSink sink = sink_for(environment.rank);
  leave_training_out(arguments, line.worker, sink);
  if (line.worker)
    apply_roll_worker(
        *line.worker, arguments, environment.world_size, [] { return 0; }, sink);
  if (arguments.use_checkpoint_args) take_checkpoint_arguments(arguments, sink);
  if (arguments.data_path.size() != 1)
    throw UsageError(
        "infer reads one data set; give --data-path PREFIX of a .bin/.idx pair or of "
        "conversations.");
  validate_for_machine(arguments, environment, sink);
  take_network_from_hf_model(arguments, sink);

  const ProcessGroupPtr group = join_world(arguments, environment);
  const c10::Device device = device_of(group, environment.local_rank);
  seed_generators(arguments, group->rank(), device);
  const Start from = find_start(arguments, group, sink);
  const BuiltModel built = build_model(arguments, from.initialises);
  freeze_model(arguments, built, sink);
  shard_model(arguments, line.worker, built, group, from.initialises, sink);
  load_weights(arguments, from, *built.model, group, device);
  check_weights(*built.model, arguments, from, group);
  infer(*built.model, arguments, flags, group, device, sink);
  group->barrier();
  return 0;
}

}  // namespace megashard
