// Saves and loads torch_dcp checkpoints, with ranks as threads, for test_dcp.py. dcp_tool ...
//
// - save FOLDER RANKS REPLICAS: tensors that test_dcp.py knows, sharded over RANKS / REPLICAS.
// - save_dist FOLDER RANKS 1: tensors that test_torch_dist.py knows, in torch_dist format.
// - save_tp FOLDER RANKS TP: three tensors, sharded by FSDP over pieces that TP ranks share.
// - load FOLDER RANKS OUT: every tensor's shards to OUT/rank<r>.safetensors, values to OUT/values.pt.
// - copy FOLDER RANKS OUT: loads, and saves again as OUT/iter_0000010.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstdio>
#include <exception>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/tensor_parallel_layout.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

ShardedTensor shard_of(const at::Tensor& whole, int parts, int index) {
  auto tensor = ShardedTensor::replicated(whole);
  if (whole.dim() == 0) return tensor;
  const auto range = chunk_range(whole.size(0), parts, index);
  tensor.local = whole.narrow(0, range.offset, range.size).clone();
  tensor.offsets[0] = range.offset;
  return tensor;
}

at::Tensor counting(at::ScalarType dtype, std::vector<int64_t> sizes, int64_t first) {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return at::arange(first, first + numel, at::TensorOptions(at::kFloat)).view(sizes).to(dtype);
}

ShardedTensors known_tensors(int parts, int index) {
  ShardedTensors tensors;
  const auto add = [&](const std::string& key, const at::Tensor& whole) {
    tensors.emplace_back(key, shard_of(whole, parts, index));
  };
  add("model.a.weight", counting(at::kFloat, {5, 3}, 0));
  add("model.b.bias", counting(at::kBFloat16, {2}, 1));
  add("model.c.weight", counting(at::kHalf, {7, 2, 2}, 2));
  add("model.d.weight", counting(at::kFloat8_e4m3fn, {4, 4}, 0));
  add("model.e.weight", counting(at::kLong, {6}, 3));
  add("optimizer.state.a.weight.exp_avg", counting(at::kFloat, {5, 3}, 100));
  add("optimizer.state.a.weight.step", at::full({}, 7, at::TensorOptions(at::kFloat)));
  return tensors;
}

ShardedTensors known_layers(int parts, int index) {
  ShardedTensors tensors;
  const auto add = [&](const std::string& key, const at::Tensor& whole) {
    tensors.emplace_back(key, shard_of(whole, parts, index));
  };
  add("model.embed.weight", counting(at::kFloat, {8, 3}, 0));
  add("model.few.weight", counting(at::kHalf, {5, 2}, 1));
  add("model.head.weight", counting(at::kFloat8_e4m3fn, {5, 4}, 0));
  add("model.ids", counting(at::kLong, {6}, 3));
  for (int64_t i = 0; i < 3; ++i) {
    const auto layer = "decoder.layers." + std::to_string(i);
    add("model." + layer + ".mlp.weight", counting(at::kBFloat16, {12, 2}, 100 * i));
    add("model." + layer + ".norm.weight", counting(at::kFloat, {4}, 10 * i));
    const auto state = "optimizer.state." + layer + ".mlp.weight.";
    add(state + "exp_avg", counting(at::kFloat, {12, 2}, 100 * i));
    add(state + "exp_avg_sq", counting(at::kFloat, {12, 2}, 1000 + 100 * i));
    add(state + "fp32_param", counting(at::kFloat, {12, 2}, 2000 + 100 * i));
    add(state + "step", at::full({}, 7, at::TensorOptions(at::kFloat)));
  }
  add("model.blocks.layers.0.weight", counting(at::kFloat, {2, 3}, 0));
  add("model.blocks.layers.1.weight", counting(at::kFloat, {3, 3}, 0));
  return tensors;
}

Dict known_values(int rank) {
  Dict arguments;
  arguments.set("hidden_size", 8);
  arguments.set("params_dtype", at::kBFloat16);
  arguments.set("name", "gr\xc3\xb6\xc3\x9f"
                        "e");
  Dict group;
  group.set("lr", 0.001);
  group.set("betas", Tuple{{0.9, 0.95}});
  group.set("params", List{{"a.weight", "b.bias"}});
  Dict optimizer;
  optimizer.set("param_groups", List{{group}});
  Dict generator;
  generator.set("torch", Bytes{std::string("\x00\x80\xff", 3) + static_cast<char>('0' + rank)});
  Dict generators;
  generators.set(std::to_string(rank), generator);
  Dict values;
  values.set("args", make_namespace(arguments));
  values.set("iteration", 10);
  values.set("checkpoint_version", 3.0);
  values.set("optimizer", optimizer);
  values.set("rng_state", generators);
  values.set("large", int64_t{1} << 40);
  values.set("nothing", Value());
  return values;
}

struct PiecesImpl : torch::nn::Module {
  explicit PiecesImpl(const DeviceMeshPtr& tp) {
    const int parts = tp->size(0);
    const auto piece = [&](const char* name, std::vector<int64_t> sizes, Placement placement) {
      set_tensor_parallel(register_parameter(name, at::empty(sizes)), tp, placement);
    };
    piece("column", {10 / parts, 3}, Placement::shard(0));
    piece("row", {6, 4 / parts}, Placement::shard(1));
    piece("bias", {5}, Placement::replicate());
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

ShardedTensors tensor_parallel_tensors(Hooked<PiecesImpl>& pieces, const DeviceMesh& mesh) {
  fully_shard(pieces, {.mesh = mesh.submesh({"dp"})});
  ShardedTensors tensors;
  for (const auto& item : pieces.named_parameters()) {
    assign_full_parameter(item.value(), counting(at::kFloat, global_sizes(item.value()), 1));
    tensors.emplace_back("model." + item.key(), reshard_and_view(item.value()));
  }
  return tensors;
}

ShardedTensors load_all(const std::string& folder, Dict& values, const ProcessGroupPtr& group) {
  ShardedTensors tensors;
  {
    const auto reader = open_step(folder);
    for (const auto& [key, dtype, sizes] : reader->tensors())
      tensors.emplace_back(key, shard_of(at::empty(sizes, at::TensorOptions(dtype)), group->size(), group->rank()));
  }
  values = load_checkpoint(CheckpointStep{folder}, tensors, group).values;
  return tensors;
}

void load(const std::string& folder, const std::string& out, const ProcessGroupPtr& group) {
  Dict values;
  const auto tensors = load_all(folder, values, group);
  std::vector<TensorInfo> infos;
  std::map<std::string, at::Tensor> shards;
  for (const auto& [key, tensor] : tensors) {
    infos.push_back({key, tensor.local.scalar_type(), tensor.local.sizes().vec()});
    shards[key] = tensor.local;
  }
  SafetensorsWriter writer(out + "/rank" + std::to_string(group->rank()) + ".safetensors", infos);
  for (const auto& info : writer.tensors()) writer.write(shards.at(info.name));
  writer.finish();
  if (group->rank() != 0) return;
  OutputFile file(out + "/values.pt");
  write_stored_value(file, values);
  file.sync_and_close();
}

void run(const std::string& command, const std::string& folder, int ranks, const std::string& last) {
  testing::run_ranks(ranks, [&](const ProcessGroupPtr& group) {
    if (command == "load") return load(folder, last, group);
    if (command == "copy") {
      Dict values;
      const auto tensors = load_all(folder, values, group);
      return save_checkpoint(last, 10, tensors, values, group);
    }
    const int shards = ranks / std::stoi(last);
    if (command == "save_dist") {
      return save_checkpoint(folder, 10, known_layers(shards, group->rank()), known_values(group->rank()), group,
                             {.format = CheckpointFormat::kTorchDist});
    }
    if (command == "save_tp") {
      const DeviceMesh mesh(group, {shards, std::stoi(last)}, {"dp", "tp"});
      Hooked<PiecesImpl> pieces(mesh.submesh({"tp"}));
      return save_checkpoint(folder, 10, tensor_parallel_tensors(pieces, mesh), {}, group);
    }
    save_checkpoint(folder, 10, known_tensors(shards, group->rank() % shards), known_values(group->rank()), group);
  });
}

}  // namespace
}  // namespace megashard

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    megashard::run(argv[1], argv[2], std::stoi(argv[3]), argv[4]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
