// Writes what an objective adds to batches of latents, for test_denoising.py.
//   noised_latents IN OUT NAME [FLAG VALUE]...
//
// IN: safetensors with latents [P, B, T], noise_seeds [B], loss_mask [B, T] and, if given, noise and timesteps. OUT:
// the columns after Objective::prepare, and weights [B, T].
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/objectives/objectives.h"

namespace megashard {
namespace {

void write_noised(char** words, int count) {
  const SafetensorsFile file(words[1]);
  std::map<std::string, double> options;
  for (int i = 4; i + 1 < count; i += 2) options[words[i]] = std::strtod(words[i + 1], nullptr);
  const auto objective = make_objective(words[3], options);
  Batch batch;
  for (const auto& info : file.tensors())
    batch.set(info.name, file.tensor(info.name), info.sizes.size() == 1 ? Axis::kRow : Axis::kToken);
  objective->prepare(batch);
  batch.set("weights", objective->weights(batch));
  std::vector<TensorInfo> infos;
  for (const auto& [name, column] : batch.columns)
    infos.push_back({.name = name, .dtype = column.data.scalar_type(), .sizes = column.data.sizes().vec()});
  SafetensorsWriter out(words[2], infos);
  for (const auto& info : out.tensors()) out.write(batch.at(info.name).contiguous());
  out.finish();
}

}  // namespace
}  // namespace megashard

int main(int argc, char** argv) {
  megashard::write_noised(argv, argc);
  return 0;
}
