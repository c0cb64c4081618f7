#include "models/hugging_face/weight_check.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "framework/modules/deferred_init.h"
#include "models/diffusion/latent_families.h"
#include "models/families/model_family.h"
#include "models/hugging_face/match_weights.h"
#include "models/lora/lora.h"
#include "models/network/prediction_files.h"
#include "models/register_models.h"

namespace megashard {
namespace {

using Json = nlohmann::ordered_json;

bool is_of_known_family(const Json& config) {
  if (latent_family_of(config) != nullptr) return true;
  const auto type = config.value("model_type", Json());
  return type.is_string() && find_family(type) != nullptr;
}

/// Reason why the model is not supported; empty if it is.
std::string unknown_model(const Json& config) {
  if (latent_family_of(config) != nullptr)
    return config.contains("quantization_config") ? "its weights are quantised" : "";
  const auto type = config.value("model_type", Json());
  if (!type.is_string()) return "it says no model_type";
  if (!is_of_known_family(config)) return type.get<std::string>() + " is no model that is known here";
  if (config.contains("quantization_config")) return "its weights are quantised";
  const auto architectures = config.value("architectures", Json());
  if (!architectures.is_array() || architectures.empty() || !architectures[0].is_string()) return "";
  const std::string name = architectures[0];
  const bool found = std::any_of(model_families().begin(), model_families().end(), [&](const ModelFamily& family) {
    return name == family.architecture || name == family.model_type || name == classifier_of(family);
  });
  return found ? "" : name + " is no model that is known here";
}

std::shared_ptr<MultiModalModule> model_on_meta(const HfConfig& config) {
  InitTape tape;
  if (const auto* family = latent_family_of(config.json()))
    return tape.construct([&]() -> std::shared_ptr<MultiModalModule> { return family->make(config); });
  const auto network = network_from_hf(
      config, [&](DecoderConfig& decoder) { decoder.prediction.depth = prediction_depth(config, family_of(config)); });
  return tape.construct([&] { return make_model(config, network, {}); });
}

/// Weights need not have the prediction layers of config.json, or none of them.
void allow_no_predictions(const std::vector<WeightTarget>& targets, WeightMismatch& mismatch) {
  const auto predicts = [](const std::string& name) {
    return name.find(std::string(".") + kPredictionLayers + ".") != name.npos;
  };
  const bool any = std::ranges::any_of(
      targets, [&](const WeightTarget& target) { return predicts(target.names.front()) && !target.parts.empty(); });
  if (!any) std::erase_if(mismatch.missing, predicts);
}

/// Rows of embeddings and head, if only these differ; nullopt otherwise.
std::optional<int64_t> other_vocabulary(const std::vector<WeightTarget>& targets,
                                        const std::vector<TensorInfo>& weights, const WeightMismatch& mismatch) {
  if (!mismatch.missing.empty() || !mismatch.unexpected.empty() || !mismatch.integers.empty()) return std::nullopt;
  std::optional<int64_t> rows;
  size_t explained = 0;
  for (const auto& target : targets) {
    if (target.parts.size() != 1 || target.parameter.dim() != 2) continue;
    const auto& source = target.parts.front().stored;
    if (!source.ends_with(kEmbeddingsWeight) && source != kHeadWeight) continue;
    const auto stored =
        std::find_if(weights.begin(), weights.end(), [&](const TensorInfo& info) { return info.name == source; });
    const auto& sizes = stored->sizes;
    const bool fits = sizes.size() == 2 && sizes[1] == target.parameter.size(1);
    if (!fits || sizes[0] == target.parameter.size(0)) continue;
    if (rows && *rows != sizes[0]) return std::nullopt;
    rows = sizes[0];
    ++explained;
  }
  return explained == mismatch.sizes.size() ? rows : std::nullopt;
}

std::vector<std::string> adapters_in(const std::vector<TensorInfo>& weights) {
  std::vector<std::string> names;
  for (const auto& info : weights) {
    if (is_lora_parameter(info.name)) names.push_back(info.name);
  }
  return names;
}

bool are_megatrons(const std::vector<TensorInfo>& weights) {
  return std::any_of(weights.begin(), weights.end(),
                     [](const TensorInfo& info) { return info.name.starts_with("embedding.word_embeddings."); });
}

}  // namespace

WeightCheck::WeightCheck(const std::string& directory) : directory_(directory) {
  const auto config = read_hf_config(directory);
  stem_ = config && latent_family_of(*config) != nullptr ? kDiffusersStem : HfSaveOptions().stem;
  unknown_ = config ? unknown_model(*config) : "there is none in " + directory;
  if (!config || !is_of_known_family(*config)) return;
  if (const auto* family = find_family(config->value("model_type", ""))) change_config_ = family->write_part;
  try {
    model_ = model_on_meta({*config, directory + "/config.json", HfConfig::Purpose::kWeights});
    weights_ = model_->weight_map();
  } catch (const c10::Error&) {
    if (unknown_.empty()) throw;
  }
  if (!unknown_.empty()) model_ = nullptr;  // its forms are known, and its names may be others
}

ModelNames WeightCheck::names() const {
  ModelNames names;
  if (model_ == nullptr) return names;
  for (const auto& item : model_->named_parameters(/*recurse=*/true)) {
    names.weights.push_back(item.key());
    if (auto other = weights_.published_name(item.key()); other != item.key())
      names.weights.push_back(std::move(other));
  }
  names.others = names_in_forms(weights_);
  return names;
}

WeightCheck::Problem WeightCheck::problem_of(const std::vector<TensorInfo>& weights) const {
  WeightMismatch mismatch;
  Problem problem;
  const auto targets = match_weights(*model_, weights, mismatch);
  allow_no_predictions(targets, mismatch);
  for (const auto& target : targets) {
    // Training can copy a missing untied head from the embeddings, but readers of the files cannot.
    problem.lacks_prefix = problem.lacks_prefix || target.is_bare;
    if (is_new_score(target)) mismatch.missing.emplace_back(kScoreWeight);
    if (!is_borrowed_head(target)) continue;
    mismatch.missing.push_back(std::string(kHeadWeight) + " (config.json says \"tie_word_embeddings\": false)");
    problem.lacks_head = mismatch.text() == "; missing: " + mismatch.missing.back();
  }
  if (const auto rows = other_vocabulary(targets, weights, mismatch)) {
    problem.is_vocabulary = true;
    problem.text = c10::str("rows for ", *rows, " tokens, and config.json says \"vocab_size\": ", model_->vocab_size());
    return problem;
  }
  const auto text = mismatch.text();
  if (!text.empty()) problem.text = "other weights than " + directory_ + "/config.json asks for" + text;
  return problem;
}

void WeightCheck::check_step(const std::vector<TensorInfo>& weights, const std::string& step) const {
  const auto adapters = adapters_in(weights);
  TORCH_CHECK(adapters.empty(), step, " holds adapters (", listed(adapters),
              "), which are no model by themselves: run pretrain with the flags of their training and with "
              "--skip-train --save-hf DIR; DIR gets the weights of --hf-model with the adapters merged in, and "
              "DIR/adapter the adapters as PEFT loads them");
  if (model_ == nullptr) return;
  auto problem = problem_of(weights);
  if (problem.text.empty() && problem.lacks_prefix)
    problem.text = "weights whose names lack the \"model.\" of a model with a head: give --hf-prefix model.";
  if (problem.text.empty()) return;
  TORCH_CHECK(!are_megatrons(weights), step,
              " has Megatron's names of weights: give --megatron-layout (torch_dist_to_hf)");
  TORCH_CHECK(
      false, step, " has ", problem.text,
      problem.is_vocabulary
          ? ". Where Megatron's flags padded the vocabulary (--make-vocab-size-divisible-by), write that number of "
            "rows into config.json; otherwise give as --model-assets-dir the directory of the model that was trained"
          : ". Give as --model-assets-dir the directory of the model that was trained; for a network of flags, let its "
            "run write the files (pretrain --load RUN --skip-train --save-hf DIR)");
}

void WeightCheck::check_files(const std::vector<TensorInfo>& weights, bool are_renamed) const {
  if (model_ == nullptr) return;
  const auto problem = problem_of(weights);
  TORCH_CHECK(
      !problem.text.empty() || !problem.lacks_prefix || are_renamed, directory_,
      " has weights whose names lack the \"model.\" of a model with a head: give --dcp-prefix model., which puts "
      "it before each of them");
  TORCH_CHECK(problem.text.empty(), directory_, " has ", problem.text,
              problem.lacks_head
                  ? ". Where the head is the embeddings, give --tie-weight-mapping "
                    "lm_head.weight=model.embed_tokens.weight, or write \"tie_word_embeddings\": true into config.json"
                  : ". Give a directory whose weights and config.json are of one model");
}

}  // namespace megashard
