#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "framework/diagnostics.h"
#include "framework/serving/loss_server.h"
#include "framework/training/loss_scale.h"
#include "framework/training/optimizers/optimizer.h"
#include "launch/arguments/command_line.h"
#include "launch/output/terminal.h"
#include "launch/train/device_report.h"
#include "launch/train/pretrain.h"
#include "launch/train/session.h"
#include "models/hugging_face/publish_weights.h"
#include "models/hugging_face/save_hf_model.h"
#include "models/lora/lora.h"

namespace megashard {
namespace {

constexpr RunParts kServing = {.data = false, .serves = true};

std::string socket_of_rank;  // used by the signal handler

void remove_socket(int signal) {
  unlink(socket_of_rank.c_str());
  _exit(128 + signal);
}

/// Makes Ctrl-C and SIGTERM end this process at once, without leaving the socket behind.
void remove_socket_at_signals(const std::string& path) {
  socket_of_rank = path;
  for (const int each : {SIGINT, SIGTERM}) {
    if (std::signal(each, remove_socket) == SIG_IGN) std::signal(each, SIG_IGN);  // nohup
  }
}

const Program& serve_program() {
  static const Program program = {
      .name = "serve",
      .purpose = "megashard serve SOCKET [FILE.yaml] [options]\n\n"
                 "Trains a model on losses that another process computes: it sends tokens to the\n"
                 "socket and gets log-probabilities, and it sends the loss's gradient by them\n"
                 "(docs/serving_losses.md; from Python: megashard.server, megashard.verl,\n"
                 "megashard.roll). Options are those of `megashard pretrain`; those about data\n"
                 "and losses are not used. Defaults are shown in [].\n",
      .flags = {},
      .shown = [](const Option&) { return true; },
      .examples = "  megashard launch -n 4 -- serve /tmp/policy --use-torch-fsdp2 --hf-model DIR \\\n"
                  "    --seq-length 4096 --train-iters 500 --lr 1e-6\n"};
  return program;
}

/// Refuses options by which the run would compute a loss of its own. --objective value gives the model the head
/// `score`.
void refuse_losses(CommandLine& line) {
  const Arguments& arguments = line.arguments;
  const auto refuse = [&](const char* name, const std::string& flag) {
    line.mistakes.require(!arguments.is_given(name),
                          flag + " is for pretrain; with serve the client computes the loss, so leave it out.");
  };
  if (arguments.objective != "value") refuse("objective", "--objective");
  refuse("rollouts", "--rollouts");
  refuse("ref_model", "--ref-model");
  refuse("loss_by_weights", "--loss-by-weights");
  refuse("calculate_per_token_loss", "--calculate-per-token-loss");
}

NamedTensors parameters_of(const torch::nn::Module& model) {
  NamedTensors named;
  for (const auto& item : model.named_parameters()) named.emplace_back(item.key(), item.value());
  return named;
}

/// Returns the `size` neighbours that share this rank's data; null: it shares with none. Collective.
ProcessGroupPtr ranks_with_same_data(const ProcessGroupPtr& world, int size) {
  if (size == 1) return nullptr;
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), world->rank() / size * size);
  return world->split(members, "serving");
}

void serve(const RunPlan& plan, const std::string& socket, const ProcessGroupPtr& world, const DiagnosticSink& sink) {
  const Session session = open_session(plan, world, sink);
  MultiModalModule& model = session.model();
  Arguments arguments = plan.arguments;
  const auto optimizer = make_optimizer(parameters_of(model), for_model(optimizer_options(arguments), model));
  OptimizerParamScheduler schedule(scheduler_options(arguments));
  const auto scaler = make_scaler(scaler_options(arguments), optimizer->parameters());
  TrainingState state{arguments, model, optimizer.get(), &schedule, session.device};
  state.scaler = scaler.get();
  const auto print = [rank = world->rank()](const std::string& text) {
    if (rank == 0) print_line(text);
  };
  if (session.from.source == WeightSource::kCheckpoint) {
    for (const auto& line : load_training_checkpoint(state, session.from.step, world, session.from.weights_only))
      print(line);
  }
  const ProcessGroupPtr& sharding = session.groups.sharding;
  const ServedRowsOptions rows{.vocab_size = model.vocab_size(),
                               .seq_length = *arguments.seq_length,
                               .length_multiple = arguments.sequence_multiple(),
                               .packs = arguments.neat_packing};
  ServedModel served(model, *optimizer,
                     {.rows = rows,
                      .step = {.clip_grad = arguments.clip_grad,
                               .needs_finite_gradients = true,
                               .empty_unused_memory_level = arguments.empty_unused_memory_level,
                               .scaler = scaler.get(),
                               .sequence = sequence_ranks(arguments, model, sharding)},
                      .sharding = sharding,
                      .device = session.device});
  const auto sharing = static_cast<int>(arguments.tensor_model_parallel_size * arguments.context_parallel_size);
  LossServerOptions options{.socket = socket,
                            .timeout = std::chrono::minutes(arguments.rollout_timeout_minutes),
                            .data_parallel_rank = world->rank() / sharing,
                            .data_parallel_size = world->size() / sharing,
                            .rows = rows,
                            .samples_of_step = *arguments.global_batch_size,
                            .save_weights =
                                [&](const std::string& folder, bool adapters) {
                                  HfWeights weights = adapters ? adapter_weights(model, arguments)
                                                               : whole_weights(model, arguments, false);
                                  weights.files.dtype = hf_model_dtype(arguments);
                                  save_hf_sharded(folder, weights.tensors, world, weights.files);
                                },
                            .print = print};
  if (arguments.publish_weights) options.listeners.push_back(publish_weights(model, arguments, world));
  LossServer server(std::move(options), served, state, arguments, world, ranks_with_same_data(world, sharing));
  if (world->rank() % sharing == 0) remove_socket_at_signals(socket + "." + std::to_string(world->rank() / sharing));
  server.run();
  world->barrier();
  log_findings(session.device, sink);
}

}  // namespace

int run_serve(int argc, char** argv) {
  const std::string socket = argc > 1 ? argv[1] : "";
  const bool asks_help = socket == "--help" || socket == "-h";
  if (!asks_help && (socket.empty() || socket.starts_with("-")))
    throw UsageError("serve: the path of the socket comes first: megashard serve SOCKET ...");
  std::vector<char*> words{argv[0]};
  words.insert(words.end(), argv + (asks_help ? 1 : 2), argv + argc);
  CommandLine line;
  try {
    line = parse_arguments(static_cast<int>(words.size()), words.data(), serve_program());
  } catch (const HelpRequested& help) {
    std::cout << help.what();
    return 0;
  }
  const RendezvousOptions environment = ranks_of_launcher(line.arguments);
  const DiagnosticSink sink = sink_for(environment.rank, line.arguments.logging_level);
  for (const auto& notice : line.notices) sink(Severity::kNotice, notice);
  refuse_losses(line);
  const RunPlan plan = plan_run(std::move(line), kServing, environment, sink);
  std::optional<ProgressLine> progress;
  if (environment.rank == 0) progress.emplace([&sink](const std::string& text) { sink(Severity::kNotice, text); });
  serve(plan, socket, join_world(plan, environment), sink);
  return 0;
}

}  // namespace megashard
