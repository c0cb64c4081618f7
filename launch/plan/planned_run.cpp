#include "launch/plan/planned_run.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <unordered_set>
#include <utility>

#include "framework/arguments/argument_value.h"
#include "framework/arguments/saved_arguments.h"
#include "framework/objectives/objectives.h"
#include "framework/training/trainer.h"
#include "launch/plan/device_file.h"
#include "launch/plan/quiet_callbacks.h"
#include "launch/train/session.h"
#include "models/diffusion/latent_families.h"
#include "models/network_arguments.h"
#include "parallel/collectives/fake_process_group.h"
#include "parallel/collectives/routed_process_group.h"
#include "parallel/device/cuda_module.h"
#include "parallel/device/memory_use.h"
#include "parallel/fsdp/fsdp_controls.h"

namespace megashard {

std::string default_device_line(const std::string& flag) {
  return "without " + flag + " the plan is of " + kDefaultDevice + "; there are " + c10::Join(", ", device_names()) +
         ", and `megashard plan --measure FILE` measures this machine for " + flag + " FILE";
}

int read_world_size(CommandLine& line) {
  const std::string text = line.own_value(kWorldSize, "1");
  const int64_t ranks = parse_integer(text).value_or(0);
  line.mistakes.require(0 < ranks && ranks <= (1 << 24), "--world-size takes a number of ranks, got \"" + text + "\".");
  return static_cast<int>(std::max<int64_t>(ranks, 1));
}

namespace {

void add_totals(PlanTotals& all, PlanTotals part) {
  all.seconds += part.seconds;
  all.host_seconds += part.host_seconds;
  all.exposed_seconds += part.exposed_seconds;
  for (auto& each : part.collectives) {
    const auto known = std::ranges::find(all.collectives, each.kind, &CollectiveTotal::kind);
    if (known == all.collectives.end()) {
      all.collectives.push_back(std::move(each));
      continue;
    }
    known->count += each.count;
    known->bytes += each.bytes;
    known->seconds += each.seconds;
  }
  std::ranges::move(part.spans, std::back_inserter(all.spans));
}

/// Samples the memory in use after each operator of a plan. While it exists, it takes the plan's totals incrementally.
class MemoryCurve {
 public:
  /// `in_use` returns the current memory. Create and destroy it on the training thread.
  MemoryCurve(const DevicePlan& plan, std::function<PeakMemory()> in_use);

  /// Totals since the last call, with all samples of that time; consecutive samples differ.
  PlanTotals take_totals(std::vector<MemorySample>& samples);

 private:
  void look();
  void take_new_totals();

  DevicePlan plan_;
  std::function<PeakMemory()> in_use_;
  PlanTotals totals_;
  double now_ = 0;  // end of the compute stream's last operation
  std::vector<MemorySample> samples_;
  OperatorWatch watch_;
};

MemoryCurve::MemoryCurve(const DevicePlan& plan, std::function<PeakMemory()> in_use)
    : plan_(plan), in_use_(std::move(in_use)), watch_([this] { look(); }) {}

PlanTotals MemoryCurve::take_totals(std::vector<MemorySample>& samples) {
  take_new_totals();
  samples = std::exchange(samples_, {});
  return std::exchange(totals_, {});
}

void MemoryCurve::take_new_totals() {
  constexpr int kComputes = 0;
  auto part = plan_.take_totals();
  for (const auto& span : part.spans) {
    if (span.stream == kComputes) now_ = std::max(now_, span.begin + span.seconds);
  }
  add_totals(totals_, std::move(part));
}

void MemoryCurve::look() {
  take_new_totals();
  const PeakMemory memory = in_use_();
  if (samples_.empty() || memory.parts() != samples_.back().memory.parts()) samples_.push_back({now_, memory});
}

constexpr int64_t kSteps = 3;  // moments exist from the second step on; the third is representative

/// Tokens are generated, and the learning rate does not matter.
constexpr RunParts kPlanned = {.schedule = false, .data = false};

template <class... Parts>
void copy_parts(const Arguments& from, Arguments& to) {
  ((static_cast<Parts&>(to) = from), ...);
}

/// The arguments that a plan has, at a constant batch size. Left at their defaults are those of data, schedule,
/// checkpoints, log and callbacks.
Arguments planned_arguments(const Arguments& given, int world_size, const PlanChange& change) {
  Arguments planned;
  copy_parts<NetworkArguments, ExpertArguments, InitializationArguments, RegularizationArguments, PrecisionArguments,
             ActivationArguments, OptimizerArguments, DistributedArguments, ContextParallelArguments,
             ModelSourceArguments, TokenizerArguments>(given, planned);
  planned.given = given.given;
  planned.given_without_effect = given.given_without_effect;
  planned.unread_sections = given.unread_sections;
  planned.use_torch_fsdp2 = given.use_torch_fsdp2 || world_size > 1;  // plans support only FSDP2
  planned.device = DeviceChoice::kSim;
  planned.distributed_backend = "cpu:gloo,cuda:nccl";
  planned.init_model_with_meta_device = true;

  planned.micro_batch_size = change.micro_batch_size ? change.micro_batch_size : given.micro_batch_size;
  planned.global_batch_size = given.global_batch_size;
  planned.decrease_batch_size_if_needed = given.decrease_batch_size_if_needed;
  planned.calculate_per_token_loss = given.calculate_per_token_loss;
  planned.check_for_nan_in_loss_and_grad = given.check_for_nan_in_loss_and_grad;
  planned.empty_unused_memory_level = given.empty_unused_memory_level;
  planned.deterministic_mode = given.deterministic_mode;
  planned.train_iters = kSteps;
  planned.eval_iters = 0;
  planned.seq_length = given.seq_length;
  planned.encoder_seq_length = given.encoder_seq_length;
  planned.eod_mask_loss = given.eod_mask_loss;
  planned.reset_position_ids = given.reset_position_ids;
  planned.reset_attention_mask = given.reset_attention_mask;
  planned.log_interval = given.log_interval;
  planned.log_params_norm = given.log_params_norm;
  planned.log_num_zeros_in_grad = given.log_num_zeros_in_grad;
  if (!change.recomputes) return planned;
  planned.recompute_granularity = RecomputeGranularity::kFull;
  planned.recompute_method = RecomputeMethod::kUniform;
  planned.recompute_num_layers = 1;
  return planned;
}

/// As plan_run, of rank 0 of a world that is not there.
RunPlan plan_of_rank_0(CommandLine line, int world_size, const PlanChange& change, const DiagnosticSink& sink) {
  line.mistakes.attempt_or_throw([&] {
    apply_files(line, kPlanned, world_size, sink);
    take_length_of_latents(line.arguments);
    if (line.arguments.use_checkpoint_args) take_checkpoint_arguments(line.arguments, sink);
  });
  TORCH_CHECK(!make_objective(line.arguments.objective, line.arguments.objective_options)->needs().values,
              "steps of --objective ", line.arguments.objective,
              " are not planned, for they have another head; plan without it, for the same model with lm_head");
  line.arguments = planned_arguments(line.arguments, world_size, change);
  RunPlan plan = validate_run(std::move(line), kPlanned,
                              {.rank = 0, .world_size = world_size, .local_world_size = world_size}, sink);
  if (change.reshard_after_forward) plan.sharding.config.reshard_after_forward = *change.reshard_after_forward;
  if (change.sharding_size) plan.sharding.config.sharding_size = *change.sharding_size;
  if (change.offloads) plan.sharding.config.offload_to_cpu = true;
  plan.hf_config = take_network_from_hf_model(plan.arguments, [](Severity, const std::string&) {});
  TORCH_CHECK(!plan.hf_config || latent_family_of(plan.hf_config->json()) == nullptr,
              "steps of models of latents are not planned, since their batches come from the data; train some, "
              "whose log lines have the times");
  return plan;
}

ProcessGroupPtr group_of_rank_0(int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return make_routed_group(make_fake_group({.rank = 0, .world_size = world_size}),
                           load_cuda_module().make_nccl_group({.rank = 0, .ranks = ranks, .device = 0}));
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

int64_t whole_bytes(const ShardedTensor& piece) {
  const auto& sizes = piece.global_sizes;
  const int64_t numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return numel * static_cast<int64_t>(piece.local.element_size());
}

std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& model) {
  std::vector<at::Tensor> all;
  std::unordered_set<const c10::TensorImpl*> seen;  // tied parameters appear several times
  for (const auto& parameter : model.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
  }
  return all;
}

/// Records the memory in use at each new peak.
class PeakWatch {
 public:
  PeakWatch(MultiModalModule& model, Optimizer& optimizer, const int64_t& step, const DevicePlan& plan, int64_t program)
      : optimizer_(optimizer), step_(step), plan_(plan), program_(program) {
    for (const auto& parameter : distinct_parameters(model)) parameters_ += bytes_of(parameter);
    set_schedule_observer(model, [this](const char* event, const std::string& unit) {
      last_event_ = std::string("after ") + event + " of " + (unit.empty() ? "the root" : unit);
    });
    step_ended();
    observe_memory_use([](const MemoryUse&) {});
    plan_.observe_peak([this](const std::string& operation, int64_t bytes) { look(operation, bytes); });
  }
  ~PeakWatch() {
    plan_.observe_peak(nullptr);
    observe_memory_use(nullptr);
  }
  PeakWatch(const PeakWatch&) = delete;
  PeakWatch& operator=(const PeakWatch&) = delete;

  void step_ended() {
    state_ = 0;
    for (const auto& [name, piece] : optimizer_.sharded_state_dict()) state_ += bytes_of(piece.local);
  }
  const PeakMemory& peak() const { return peak_; }

  /// Current memory; on a CPU without its pool's free blocks and without the program.
  PeakMemory in_use() const {
    const MemoryUse use = memory_use();
    const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(0);
    PeakMemory now{.bytes = (program_ > 0 ? stats.requested_bytes : stats.allocated_bytes)[0].current,
                   .parameters = parameters_,
                   .optimizer = state_,
                   .unsharded = use.unsharded,
                   .communication = use.communication};
    for (const auto& parameter : optimizer_.parameters()) {
      const at::Tensor& gradient = parameter.grad();
      const int64_t bytes = bytes_of(gradient);
      now.gradients += bytes;
      if (bytes > 0 && is_counted_communication(gradient)) now.communication -= bytes;  // counted once
    }
    return now;
  }

 private:
  void look(const std::string& operation, int64_t bytes) {
    peak_ = in_use();
    peak_.program = program_;
    peak_.kept = bytes - peak_.bytes;
    peak_.bytes = bytes + program_;
    peak_.moment = "step " + std::to_string(step_) + (last_event_.empty() ? "" : ", " + last_event_);
    peak_.operation = operation;
  }

  Optimizer& optimizer_;
  const int64_t& step_;
  DevicePlan plan_;
  int64_t program_;
  int64_t parameters_ = 0, state_ = 0;
  std::string last_event_;
  PeakMemory peak_;
};

/// Host memory of CPU offload; gradients are as large as the sharded parameters.
int64_t host_bytes(Optimizer& optimizer) {
  const auto of = [](const at::Tensor& tensor) { return tensor.is_cpu() ? static_cast<int64_t>(tensor.nbytes()) : 0; };
  int64_t bytes = 0;
  for (const auto& parameter : optimizer.parameters()) bytes += 2 * of(parameter);
  for (const auto& [name, piece] : optimizer.sharded_state_dict()) bytes += of(piece.local);
  return bytes;
}

double peak_flops(const DeviceModel& device, at::ScalarType computed_in) {
  return c10::elementSize(computed_in) == 2 ? device.flops_16 : device.flops_32;
}

}  // namespace

std::vector<std::pair<std::string, int64_t>> PeakMemory::parts() const {
  std::vector<std::pair<std::string, int64_t>> all = {
      {"sharded parameters", parameters},       {"gradients", gradients},
      {"optimizer state", optimizer},           {"unsharded parameters", unsharded},
      {"communication buffers", communication}, {"activations and the rest", rest()}};
  if (program > 0) {
    all.emplace_back("free, kept for reuse", kept);
    all.emplace_back("program and libraries", program);
  }
  return all;
}

PlannedRun run_planned(const CommandLine& line, const PlanOptions& options) {
  const auto& [device, world_size, keeps_spans, sink, change] = options;
  const RunPlan run_plan = plan_of_rank_0(line, world_size, change, sink);
  const Arguments& arguments = run_plan.arguments;
  const DevicePlan plan = begin_device_plan(device, keeps_spans);
  const ProcessGroupPtr group = group_of_rank_0(world_size);
  PlannedRun run{.world_size = world_size};
  const auto count_parameters = [&run](const MultiModalModule& model) {
    for (const auto& parameter : distinct_parameters(model)) run.parameters += parameter.numel();
  };
  const Session session = build_session(run_plan, ParallelGroups(arguments, group), {WeightSource::kInitialisation},
                                        sink, {.model_built = count_parameters});
  MultiModalModule& model = session.model();
  const DataOptions data{.mock_data = true,
                         .seq_length = *arguments.seq_length,
                         .seed = arguments.seed,
                         .vocab_size = model.vocab_size(),
                         .eod_id = model.vocab_size() - 1};
  int64_t step = 1;
  PeakWatch* watch = nullptr;
  std::optional<MemoryCurve> curve;
  Trainer trainer(plan_training(arguments, data), model, session.groups, session.device, quiet_callbacks([&] {
                    run.step = curve ? curve->take_totals(run.memory) : plan.take_totals();
                    watch->step_ended();
                    ++step;
                  }));
  PeakWatch watches(model, trainer.optimizer(), step, plan, device.program_memory);
  watch = &watches;
  plan.take_totals();
  if (keeps_spans) curve.emplace(plan, [&] { return watches.in_use(); });
  trainer.train();
  curve.reset();
  run.host_bytes = host_bytes(trainer.optimizer());
  run.units = unit_summaries(model);
  run.peak = watches.peak();
  run.tokens = *arguments.global_batch_size * *arguments.seq_length;
  run.flops = model.training_flops(*arguments.global_batch_size, *arguments.seq_length);
  run.peak_flops = peak_flops(device, session.computed_in);
  for (const auto& parameter : distinct_parameters(model))
    run.checkpoint_bytes += whole_bytes(reshard_and_view(parameter));
  for (const auto& [name, piece] : trainer.optimizer().sharded_state_dict()) run.checkpoint_bytes += whole_bytes(piece);
  return run;
}

}  // namespace megashard
