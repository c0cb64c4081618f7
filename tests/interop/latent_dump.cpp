// Runs models of latents on given batches, forward and backward, and writes what test_diffusion.py compares.
//   latent_dump JOBS.json
// Fields of a job: `model` (directory), `input` (safetensors: columns of a batch of latents by their names), `output`
// (safetensors, to write: predictions; losses of the patches; grad.NAME of the mean loss of the patches of token_mask;
// flops of a step; aux.NAME of each rank, terms that the model adds), `world` (ranks, which are threads), and optional:
// `fsdp2_config` (text of an FSDP2 file; absent: the model is not sharded), `sequence_ranks`, `ring`, `adapters`
// (safetensors of LoRA matrices by their names here, of rank 2 and alpha 4, for the layers `targets`).
// With MEGASHARD_TEST_DEVICE=sim ranks have a simulated device.
#include <ATen/Functions.h>

#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/latent_columns.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/model_registry.h"
#include "models/hugging_face/load_hf_weights.h"
#include "models/lora/lora.h"
#include "models/register_models.h"
#include "parallel/fsdp/fully_shard.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using nlohmann::json;

const std::set<std::string> kOfPatches = {kLatents,     kTargets,   kConditions,  kControls,
                                          kPositionIds, kTokenMask, kCleanPatches};

Batch read_batch(const SafetensorsFile& file) {
  Batch batch;
  for (const auto& info : file.tensors()) {
    batch.set(info.name, file.tensor(info.name).clone(), kOfPatches.contains(info.name) ? Axis::kToken : Axis::kRow,
              /*is_input=*/info.name != kTargets && info.name != kSoundTargets);
  }
  return batch;
}

Batch samples_of(const Batch& batch, int64_t first, int64_t count) {
  Batch part = batch;
  for (auto& [name, column] : part.columns) {
    const int64_t dim = column.axis == Axis::kToken ? column.data.dim() - 2 : 0;
    column.data = column.data.narrow(dim, first, count);
  }
  return part;
}

class Results {
 public:
  /// Writes `part` to its place in a tensor of `sizes`.
  void put(const std::string& name, at::IntArrayRef sizes, at::IntArrayRef offsets, const at::Tensor& part) {
    const std::scoped_lock lock(mutex_);
    auto& whole = tensors_[name];
    if (!whole.defined()) whole = at::zeros(sizes, part.options().device(at::kCPU));
    at::Tensor place = whole;
    for (int64_t dim = 0; dim < part.dim(); ++dim)
      place = place.narrow(dim, offsets[static_cast<size_t>(dim)], part.size(dim));
    place.copy_(part.detach());
  }
  void write(const std::string& path) const {
    std::vector<TensorInfo> infos;
    for (const auto& [name, tensor] : tensors_) infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
    SafetensorsWriter writer(path, infos);
    for (const auto& info : writer.tensors()) writer.write(tensors_.at(info.name));
    writer.finish();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
};

void add_adapters(MultiModalModule& model, const json& job) {
  if (!job.contains("adapters")) return;
  add_lora(model, {.rank = 2, .alpha = 4, .target_modules = job.at("targets").get<std::vector<std::string>>()});
  const SafetensorsFile file(job.at("adapters"));
  const at::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    if (is_lora_parameter(item.key())) item.value().copy_(file.tensor(item.key()));
  }
}

void run(const json& job, const ProcessGroupPtr& world, Results& results) {
  ModelRegistry registry;
  register_models(registry);
  Arguments arguments;
  arguments.hf_model = job.at("model");
  const auto model = registry.create(arguments);
  load_hf_weights(*model, *arguments.hf_model);
  add_adapters(*model, job);
  if (job.contains("fsdp2_config")) {
    const auto config =
        parse_fsdp2_config(job.at("fsdp2_config"), "the job", Strictness::kStrict, [](Severity, const auto&) {});
    dynamic_cast<FSDP2Mixin&>(*model).fully_shard(
        {.process_group = world, .config = config, .strictness = Strictness::kStrict});
  }
  if (!job.contains("fsdp2_config")) model->to(world->device());
  const Batch whole = read_batch(SafetensorsFile(job.at("input")));
  const int sharing = job.value("sequence_ranks", 1);
  std::vector<int> members(static_cast<size_t>(sharing));
  std::iota(members.begin(), members.end(), world->rank() / sharing * sharing);
  const int64_t samples = whole.rows() * sharing / world->size(), first = world->rank() / sharing * samples;
  Batch batch = samples_of(whole, first, samples);
  if (sharing > 1) batch.sequence = share_sequences(world->subgroup(members, "sequence"), job.value("ring", 1));
  batch.sequence = batch.sequence.with_length(whole.length());
  if (sharing > 1)
    model->check_sequence_ranks(batch.sequence.of_place().is_whole() ? 1 : sharing / job.value("ring", 1));
  results.put("flops", {}, {}, at::scalar_tensor(model->training_flops(whole.rows(), whole.length()), at::kDouble));
  batch = rows_of_rank(to_device(model->prepared(batch), world->device()));

  auto unlabelled = batch;
  unlabelled.take(kTargets);
  {
    const at::NoGradGuard no_grad;
    const auto own = (*model)(unlabelled).predictions;
    results.put("predictions", whole.at(kLatents).sizes(), {0, first, 0}, whole_of_rows(own, 2, batch.sequence));
  }
  const auto output = (*model)(batch);
  const auto& losses = output.token_losses;
  results.put("losses", {whole.rows(), whole.length()}, {first, 0}, whole_of_rows(losses, 1, batch.sequence));
  const auto mask = whole.token_mask();
  const double count = mask.defined() ? mask.sum().item<double>() : static_cast<double>(whole.rows() * whole.length());
  const auto counted = mask.defined() ? losses * batch.token_mask() : losses;
  auto total = counted.sum() * (world->size() / count);  // FSDP takes the mean over ranks
  for (const auto& term : output.aux) {
    total = total + term.value;
    results.put("aux." + term.name, {world->size()}, {world->rank()}, term.metric.view({1}));
  }
  total.backward();
  for (const auto& item : model->named_parameters()) {
    if (!item.value().grad().defined()) continue;
    const auto piece = reshard_and_view(item.value());
    results.put("grad." + item.key(), piece.global_sizes, piece.offsets, item.value().grad());
  }
}

void run_job(const json& job) {
  Results results;
  testing::run_ranks(
      job.at("world"), [&](const ProcessGroupPtr& world) { run(job, world, results); }, std::chrono::seconds(60));
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
    TORCH_CHECK(argc == 2, "usage: latent_dump JOBS.json");
    std::ifstream file(argv[1]);
    const auto jobs = nlohmann::json::parse(file);
    if (megashard::testing::on_simulated_device()) {
      megashard::use_simulated_device();
      megashard::testing::simulated_cuda();
    }
    for (const auto& job : jobs) megashard::run_job(job);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "latent_dump: " << error.what() << "\n";
    return 1;
  }
}
