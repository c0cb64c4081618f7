#include "models/hugging_face/load_hf_weights.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "checkpoint/files/work_progress.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "models/hugging_face/match_weights.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

void load_hf_weights(torch::nn::Module& module, const std::filesystem::path& hf_dir) {
  const auto files = open_hf_weights(hf_dir.string());
  WeightMismatch mismatch;
  const auto targets = match_weights(module, files->tensors(), mismatch);
  const auto problem = mismatch.text();
  TORCH_CHECK(problem.empty(), "the weights in ", hf_dir.string(), " are not those of the model", problem,
              ". Give the directory that the model's config.json comes from");
  const at::NoGradGuard no_grad;
  int64_t bytes = 0;
  for (const auto& target : targets) bytes += static_cast<int64_t>(sharded_view(target.parameter).local.nbytes());
  LongWork work("load", bytes);
  for (const auto& target : targets) {
    auto piece = sharded_view(target.parameter);
    auto stored = target.stacked ? target.stacked->view(*files) : files->read_tensor(target.source);
    for (int64_t dim = 0; dim < stored.dim(); ++dim) {
      if (piece.local.size(dim) == stored.size(dim)) continue;
      const int64_t rows = piece.local.size(dim);
      stored = stored.narrow(dim, rows == 0 ? 0 : piece.offsets[static_cast<size_t>(dim)], rows);
    }
    if (stored.numel() > 0) piece.local.copy_(stored);
    work.add(static_cast<int64_t>(piece.local.nbytes()));
  }
}

}  // namespace megashard
