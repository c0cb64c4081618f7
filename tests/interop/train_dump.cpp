// Trains Hugging Face models with megashard and writes the same results as fsdp2_reference.py does for PyTorch FSDP2.
// The job file and its fields are described there. This program reads five more fields: `fsdp2_config` (text of an
// FSDP2 file, which the model's mixin follows instead of `mesh`), `sequence_ranks` (ranks that share each row,
// Ulysses), `ring` (size of their ring), `expert_ranks` (ranks that share the experts) and `tensor_ranks` (ranks that
// share the layers).
// Ranks are threads on the real Gloo backend, or one rank of a fake group. With MEGASHARD_TEST_DEVICE=sim each has a
// simulated device. Conversations are read by the data loader's own functions.
//   train_dump JOB.json

#include <ATen/Functions.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>
#include <set>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/data/conversation_dataset.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/model_registry.h"
#include "framework/objectives/objectives.h"
#include "framework/training/optimizers/optimizer.h"
#include "framework/training/parallel_groups.h"
#include "framework/training/train_step.h"
#include "framework/training/training_data.h"
#include "models/float8/float8_layers.h"
#include "models/hugging_face/load_hf_weights.h"
#include "models/register_models.h"
#include "parallel/collectives/fake_process_group.h"
#include "parallel/device/buffer_pool.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/grad_scaler.h"
#include "tests/interop/live_memory.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using nlohmann::json;

/// The output file that the ranks of one case write together.
class Results {
 public:
  void put(const std::string& name, const at::Tensor& value) {
    const std::scoped_lock lock(mutex_);
    tensors_[name] = value.detach().cpu().clone();
  }
  /// Writes `local` to its place in the whole tensor, which `piece` gives.
  void put_piece(const std::string& name, const ShardedTensor& piece, const at::Tensor& local) {
    const std::scoped_lock lock(mutex_);
    auto& whole = tensors_[name];
    if (!whole.defined()) whole = at::full(piece.global_sizes, std::nan(""), local.options().device(at::kCPU));
    at::Tensor place = whole;
    for (int64_t dim = 0; dim < local.dim(); ++dim) {
      place = place.narrow(dim, piece.offsets[static_cast<size_t>(dim)], local.size(dim));
    }
    place.copy_(local);
  }
  void saw_dtype(const std::string& where, at::ScalarType dtype) {
    const std::scoped_lock lock(mutex_);
    dtypes_[where].insert(torch_dtype_name(dtype));
  }

  void write(const std::string& path) const {
    std::map<std::string, std::string> metadata = {{"format", "pt"}};
    for (const auto& [where, dtypes] : dtypes_) {
      for (const auto& dtype : dtypes) {
        auto& list = metadata[where];
        list += (list.empty() ? "" : " ") + dtype;
      }
    }
    std::vector<TensorInfo> infos;
    for (const auto& [name, tensor] : tensors_) {
      infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
    }
    SafetensorsWriter writer(path, infos, metadata);
    for (const auto& info : writer.tensors()) writer.write(tensors_.at(info.name));
    writer.finish();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
  std::map<std::string, std::set<std::string>> dtypes_;  // dtypes of collectives, parameters and state
};

std::optional<at::ScalarType> dtype_of(const json& name) {
  if (name.is_null()) return std::nullopt;
  return find_dtype_by_torch_name(name.get<std::string>())->dtype;
}

Arguments arguments_of(const json& job, int rank) {
  Arguments arguments;
  arguments.hf_model = job.at("model");
  arguments.expert_model_parallel_size = job.value("expert_ranks", 1);
  arguments.tensor_model_parallel_size = job.value("tensor_ranks", 1);
  arguments.rank = rank;
  return arguments;
}

std::shared_ptr<MultiModalModule> make_model(const json& job, const Arguments& arguments) {
  ModelRegistry registry;
  register_models(registry);
  auto model = registry.create(arguments);
  if (job.contains("fp8")) {
    const auto& fp8 = job.at("fp8");
    const auto gradients = fp8.at("gradients") == "e5m2" ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
    if (fp8.at("recipe") == "nvfp4") {
      use_float4(*model);
    } else {
      use_float8(*model, {.recipe = fp8.at("recipe") == "mxfp8" ? Float8Recipe::kMxfp8 : Float8Recipe::kTensorwise,
                          .gradient_format = gradients});
    }
  }
  return model;
}

std::vector<torch::nn::Module*> layers_of(const MultiModalModule& model) {
  const std::regex layer("model\\.(layers|language_model\\.layers|visual\\.blocks)\\.[0-9]+");
  std::vector<torch::nn::Module*> layers;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (std::regex_match(item.key(), layer)) layers.push_back(item.value().get());
  }
  return layers;
}

void shard_by_file(MultiModalModule& model, const json& job, const ParallelGroups& groups) {
  const auto config =
      parse_fsdp2_config(job.at("fsdp2_config"), "the job", Strictness::kStrict, [](Severity, const std::string&) {});
  dynamic_cast<FSDP2Mixin&>(model).fully_shard({.process_group = groups.sharding,
                                                .tensor_parallel_group = groups.tensor_parallel,
                                                .config = config,
                                                .strictness = Strictness::kStrict});
}

void shard(MultiModalModule& model, const json& job, DeviceMeshPtr mesh) {
  FullyShardOptions options;
  options.mesh = std::move(mesh);
  options.mixed_precision.param_dtype = dtype_of(job.at("param_dtype"));
  options.mixed_precision.reduce_dtype = dtype_of(job.at("reduce_dtype"));
  if (!job.at("reshard").is_null()) options.reshard_after_forward = job.at("reshard").get<bool>();
  for (auto* layer : layers_of(model)) fully_shard(*layer, options);
  fully_shard(model, options);
}

/// Each parameter once, under its first name.
NamedTensors parameters_of(const torch::nn::Module& model) {
  NamedTensors found;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : model.named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    found.emplace_back(item.key(), item.value());
  }
  return found;
}

/// The neighbouring ranks that share each row.
SequenceShard sequence_ranks(const json& job, const ProcessGroupPtr& sharding) {
  const int ranks = job.value("sequence_ranks", 1);
  if (ranks == 1) return {};
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), sharding->rank() / ranks * ranks);
  return share_sequences(sharding->subgroup(members, "sequence"), job.value("ring", 1));
}

/// The job's `loss_scale`.
struct Scaling {
  Scaling(const json& job, c10::Device device) {
    if (job.value("loss_scale", json()).is_null()) return;
    const auto& given = job.at("loss_scale");
    overflows = given.at("overflows").get<std::set<int64_t>>();
    scaler.emplace(GradScaler::Options{.initial_scale = given.at("initial"), .growth_interval = given.at("window")},
                   device);
  }

  std::set<int64_t> overflows;  // steps in which the last shard of the first gradient is infinite
  std::optional<GradScaler> scaler;
};

/// Rows of `batches`, or the same number of conversations for each step.
class JobData {
 public:
  explicit JobData(const json& job) {
    if (!job.contains("conversations")) {
      batches_ = SafetensorsFile(job.at("batches")).tensor("tokens");
      rows_ = batches_.size(1);
      return;
    }
    rows_ = job.at("rows");
    if (job.value("ring", 1) > 1) length_multiple_ = 2 * job.at("sequence_ranks").get<int64_t>();
    const auto set = std::make_shared<ConversationSet>(job.at("conversations").get<std::string>());
    conversations_ =
        std::make_unique<ConversationDataset>(set, SplitOptions{.split_name = "train",
                                                                .last = set->size(),
                                                                .seq_length = 1024,
                                                                .num_samples = rows_ * job.at("steps").get<int64_t>()});
  }
  int64_t rows() const { return rows_; }

  Batch read(int64_t step, int64_t first, int64_t count) const {
    if (!conversations_) {
      const at::Tensor whole = batches_[step].narrow(0, first, count);
      const int64_t length = whole.size(1) - 1;
      Batch batch;
      batch.set(kTokens, whole.narrow(1, 0, length));
      batch.set(kLabels, whole.narrow(1, 1, length));
      batch.set(kLossMask, at::ones({count, length}), Axis::kToken, /*is_input=*/false);
      return batch;
    }
    std::vector<int64_t> indices(static_cast<size_t>(count));
    std::iota(indices.begin(), indices.end(), step * rows_ + first);
    return conversations_->collate(indices, {.length_multiple = length_multiple_, .vocab_size = int64_t{1} << 20});
  }

 private:
  at::Tensor batches_;
  int64_t rows_ = 0;
  int64_t length_multiple_ = 1;
  std::unique_ptr<ConversationDataset> conversations_;
};

/// Bytes of this rank's tensors, if the job asks for them.
class StepMemory {
 public:
  explicit StepMemory(const json& job) : counts_(job.contains("count_memory")) {
    if (counts_) live_memory_of_this_thread();
  }
  bool counts() const { return counts_; }
  void end_step() {
    peaks_.push_back(live_memory_peak());
    kept_.push_back(live_memory_now());
    live_memory_restart_peak();
  }
  void put_into(Results& results) const {
    results.put("peak_bytes", at::tensor(peaks_));
    results.put("kept_bytes", at::tensor(kept_));
  }

 private:
  bool counts_;
  std::vector<int64_t> peaks_, kept_;
};

void train(const json& job, const ProcessGroupPtr& world, Results& results) {
  StepMemory memory(job);
  std::vector<testing::CollectiveCall> calls;
  const auto shape = job.at("mesh").get<std::vector<int>>();
  const std::vector<std::string> names = {"replicate", "shard"};
  const Arguments arguments = arguments_of(job, world->rank());
  const ParallelGroups groups(arguments, world);
  const ProcessGroupPtr& sharding = groups.sharding;
  const auto model = make_model(job, arguments);
  if (job.contains("fsdp2_config")) {
    shard_by_file(*model, job, groups);
  } else {
    shard(*model, job, testing::recording_mesh(world, shape, {names.end() - shape.size(), names.end()}, calls));
  }
  load_hf_weights(*model, job.at("model").get<std::string>());
  model->train();
  const NamedTensors parameters = parameters_of(*model);
  const auto optimizer =
      make_optimizer(parameters, {.kind = job.at("optimizer") == "sgd" ? OptimizerKind::kSgd : OptimizerKind::kAdam,
                                  .lr = job.at("lr"),
                                  .weight_decay = job.at("weight_decay")});

  const JobData data(job);
  const SequenceShard sequence = sequence_ranks(job, sharding);
  const int64_t sharing = sequence.is_whole() ? 1 : sequence.group->size();
  const int64_t rows = data.rows() * sharing / sharding->size();
  const int64_t steps = job.at("steps");
  at::Tensor losses = at::empty({steps}, at::kDouble), norms = at::empty({steps}, at::kDouble);
  at::Tensor scales = at::empty({steps}, at::kDouble);
  Scaling scaling(job, parameters.front().second.device());
  const auto objective = make_objective(kNextToken, {});
  TrainStep trained(*model, *objective, *optimizer, sharding, sharding->device(),
                    {.clip_grad = job.at("clip"),
                     .calculate_per_token_loss = true,
                     .scaler = scaling.scaler ? &*scaling.scaler : nullptr,
                     .sequence = sequence});
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor sums = trained.backward({data.read(step, sharding->rank() / sharing * rows, rows)});
    if (scaling.overflows.contains(step) && world->rank() % shape.back() == shape.back() - 1)
      parameters.front().second.mutable_grad().fill_(std::numeric_limits<double>::infinity());
    for (const auto& [name, parameter] : parameters) {
      if (!parameter.grad().defined()) continue;  // not used between tokens and logits
      results.saw_dtype("gradient", parameter.grad().scalar_type());
      if (step == 0 && !memory.counts())
        results.put_piece("grad." + name, reshard_and_view(parameter), parameter.grad());
    }
    const DeviceStats stats = trained.clip(sums);
    trained.update();
    optimizer->zero_grad();
    norms[step] = at::where(stats.grad_norm.isfinite(), stats.grad_norm, 1);
    scales[step] = stats.loss_scale;
    at::Tensor all = stats.sums.clone();
    world->all_reduce(all, ReduceOp::kSum).wait();
    losses[step] = all[0] / all[1];
    if (memory.counts()) memory.end_step();
  }
  for (const auto& [name, parameter] : parameters) {
    const ShardedTensor piece = reshard_and_view(parameter);
    results.saw_dtype("parameter", piece.local.scalar_type());
    if (!memory.counts()) results.put_piece("weight." + name, piece, piece.local);
  }
  for (const auto& [name, piece] : optimizer->sharded_state_dict()) {
    results.saw_dtype("optimizer_state", piece.local.scalar_type());
  }
  int64_t gathered_bytes = 0;  // all-gathers move bytes: only the size shows their dtype
  for (const auto& call : calls) {
    results.saw_dtype(call.numel == 1 ? "scalar_" + call.operation : call.operation, call.dtype);
    if (call.operation == "all_gather") gathered_bytes += call.numel * c10::elementSize(call.dtype);
  }
  auto units = layers_of(*model);
  units.push_back(model.get());
  for (auto* unit : units) unshard(*unit);
  for (const auto& [name, parameter] : parameters) {
    results.saw_dtype("gathered_parameter", parameter.scalar_type());
  }
  for (auto* unit : units) reshard(*unit);
  if (world->rank() == 0) {
    results.put("gathered_bytes_a_step", at::scalar_tensor(gathered_bytes / steps, at::kLong));
    results.put("loss", losses);
    results.put("grad_norm", norms);
    if (scaling.scaler) results.put("loss_scale", scales);
    if (memory.counts()) memory.put_into(results);
  }
}

void run_case(const json& job) {
  int world_size = 1;
  for (const int size : job.at("mesh")) world_size *= size;
  Results results;
  const auto run = [&](const ProcessGroupPtr& world) { train(job, world, results); };
  if (job.value("process_group", "gloo") == "fake") {
    run(make_fake_group({.rank = 0, .world_size = world_size}));
  } else {
    testing::run_ranks(world_size, run, std::chrono::seconds(60));
  }
  if (testing::on_simulated_device()) {
    const auto findings = testing::simulated_cuda().take_findings();
    TORCH_CHECK(findings.empty(), findings.size(), " finding(s) of the simulated device, first: ", findings.front());
  }
  results.write(job.at("output"));
}

}  // namespace
}  // namespace megashard

int main(int argc, char** argv) {
  try {
    TORCH_CHECK(argc == 2, "usage: train_dump JOB.json");
    std::ifstream file(argv[1]);
    const auto jobs = nlohmann::json::parse(file);
    if (std::ranges::any_of(jobs, [](const auto& job) { return job.contains("count_memory"); })) {
      live_memory_start();
      megashard::observe_cpu_buffer_pool(live_memory_add);
    }
    if (megashard::testing::on_simulated_device()) {
      megashard::use_simulated_device();
      megashard::testing::simulated_cuda();
    }
    for (const auto& job : jobs) megashard::run_case(job);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "train_dump: " << error.what() << "\n";
    return 1;
  }
}
