#include "models/hugging_face/load_hf_weights.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "checkpoint/files/work_progress.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "framework/modules/weight_init_mixin.h"
#include "models/hugging_face/match_weights.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

namespace {

/// Throws if the files have two different values for one parameter.
void check_others(const WeightTarget& target, CheckpointReader& files, const std::string& where) {
  if (target.others.empty()) return;
  const auto piece = reshard_and_view(target.parameter);
  const auto values = [&](const std::string& name) {
    auto read = piece;
    read.local = at::empty(piece.local.sizes(), piece.local.options().device(at::kCPU).requires_grad(false));
    read_part(whole_part(name, name, piece.global_sizes), files.read_tensor(name), read);
    return read.local;
  };
  const auto& source = target.parts.front().stored;
  for (const auto& name : target.others) {
    const bool is_same = files.find(name)->sizes == piece.global_sizes && values(source).equal(values(name));
    const bool is_head = name == kHeadWeight || source == kHeadWeight;
    TORCH_CHECK(
        is_same, where, " has other values for ", name, " than for ", source, ", and the model one weight for both",
        is_head ? ": config.json says \"tie_word_embeddings\": true. Write false there to train a head of its own, as "
                  "transformers reads these files, or take lm_head.weight out of them"
                : ": take one of them out of the files");
  }
}

void tell(const std::vector<WeightTarget>& targets, const WeightMismatch& mismatch, const std::string& where,
          const DiagnosticSink& sink) {
  if (std::any_of(targets.begin(), targets.end(), is_borrowed_head)) {
    sink(Severity::kWarning,
         where + " has no lm_head.weight, and config.json says \"tie_word_embeddings\": false: the "
                 "head begins as a copy of the embeddings and is trained by itself; where the model is tied, "
                 "write true");
  }
  if (std::any_of(targets.begin(), targets.end(), is_new_score)) {
    sink(Severity::kNotice, where + " has no score.weight: the head begins with random values" +
                                (mismatch.heads.empty() ? "" : ", and lm_head.weight of the files is not read"));
  }
  if (!mismatch.predicting.empty())
    sink(Severity::kNotice, c10::str("of ", where, " ", mismatch.predicting.size(),
                                     " tensors are not read: they predict further tokens, which is not trained here: ",
                                     listed(mismatch.predicting)));
  if (!mismatch.of_others.empty())
    sink(Severity::kNotice, c10::str("of ", where, " ", mismatch.of_others.size(),
                                     " tensors are not read: they belong to a model beside this one, which is not "
                                     "trained here and will not be saved: ",
                                     listed(mismatch.of_others)));
  if (!mismatch.unused.empty())
    sink(Severity::kNotice, c10::str("of ", where, " ", mismatch.unused.size(),
                                     " tensors are not used, because config.json "
                                     "says what they are: ",
                                     listed(mismatch.unused)));
}

/// All ranks draw the same numbers and keep their own.
void draw_score(torch::nn::Module& module, const WeightTarget& target) {
  auto* init = dynamic_cast<WeightInitMixin*>(&module);
  TORCH_CHECK(init != nullptr, "the files have no score.weight, and the model no WeightInitMixin to draw it by");
  const auto piece = reshard_and_view(target.parameter);
  const auto& [std, generator] = init->weight_init();
  const at::Tensor whole = at::empty(piece.global_sizes).normal_(0, std, generator);
  read_part(whole_part(kScoreWeight, kScoreWeight, piece.global_sizes), whole, piece);
}

}  // namespace

void load_hf_weights(torch::nn::Module& module, const std::filesystem::path& hf_dir, const DiagnosticSink& sink) {
  const auto files = open_hf_model(hf_dir.string());
  WeightMismatch mismatch;
  const auto targets = match_weights(module, files->tensors(), mismatch);
  const auto problem = mismatch.text();
  TORCH_CHECK(problem.empty(), "the weights in ", hf_dir.string(), " are not those of the model", problem,
              ". Give the directory that the model's config.json comes from");
  const at::NoGradGuard no_grad;
  for (const auto& target : targets) check_others(target, *files, hf_dir.string());
  tell(targets, mismatch, hf_dir.string(), sink);
  int64_t bytes = 0;
  for (const auto& target : targets) bytes += static_cast<int64_t>(reshard_and_view(target.parameter).local.nbytes());
  LongWork work("load", bytes);
  for (const auto& target : targets) {
    const auto piece = reshard_and_view(target.parameter);
    for (const auto& part : target.parts) read_part(part, files->read_tensor(part.stored), piece);
    if (is_new_score(target)) draw_score(module, target);
    work.add(static_cast<int64_t>(piece.local.nbytes()));
  }
}

}  // namespace megashard
