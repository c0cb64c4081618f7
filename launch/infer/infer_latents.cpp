#include "launch/infer/infer_latents.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/files/output_file.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"
#include "framework/arguments/argument_value.h"
#include "framework/data/latent_dataset.h"
#include "framework/objectives/objectives.h"
#include "framework/training/output_paths.h"
#include "framework/training/progress.h"

namespace megashard {
namespace {

constexpr const char* kSampledLatents = "--latents";
constexpr const char* kPredictedVelocities = "--velocities";
constexpr const char* kSamplingSteps = "--sampling-steps";
constexpr const char* kSamplingShift = "--sampling-shift";
constexpr const char* kGuidanceScale = "--guidance-scale";

/// A folder of features as LatentSet reads them. Ranks write the samples that they have; the first one lists all.
class FeatureFolder {
 public:
  explicit FeatureFolder(std::string folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_ + "/features");
  }

  void write(int64_t number, const at::Tensor& video) const {
    Dict features;
    features.set("video", tensor_value(video.contiguous()));
    OutputFile file(folder_ + "/" + name_of(number));
    write_stored_value(file, features);
    file.sync_and_close();
  }

  void write_list(const LatentSet& set) const {
    std::ofstream list(folder_ + kLatentsFile);
    for (int64_t i = 0; i < set.size(); ++i)
      list << nlohmann::ordered_json{{"file", name_of(i)}, {"shape", set.shape(i)}}.dump() << '\n';
    TORCH_CHECK(list.flush().good(), "cannot write ", folder_, kLatentsFile);
  }

 private:
  static std::string name_of(int64_t number) { return "features/" + std::to_string(number) + ".pt"; }

  std::string folder_;
};

/// Sizes of a sample without channels.
std::vector<int64_t> grid_of(const LatentSet& set, int64_t sample) {
  const auto& shape = set.shape(sample);
  return {shape[1], shape[2], shape[3]};
}

}  // namespace

std::vector<OwnFlag> latent_flags() {
  return {{kSampledLatents, "DIR",
           "latents that a model of velocities makes of noise, for the text of each sample of "
           "--data-path: a folder like that"},
          {kPredictedVelocities, "DIR",
           "the prediction for the data's `noise` and `timestep`: a folder like that of --data-path"},
          {kSamplingSteps, "INT", "of --latents: steps of Euler's method [50]"},
          {kSamplingShift, "FLOAT", "of --latents: s, which shifts sigma to s sigma / (1 + (s - 1) sigma) [1]"},
          {kGuidanceScale, "FLOAT",
           "of --latents: how far from the empty prompt's velocity; 1: that prompt is not used [1]"}};
}

LatentOutputs latent_outputs(const std::map<std::string, std::string>& own, Mistakes& mistakes) {
  const auto value = [&own](const char* flag) {
    const auto found = own.find(flag);
    return found == own.end() ? std::nullopt : std::optional(found->second);
  };
  LatentOutputs outputs{value(kSampledLatents), value(kPredictedVelocities)};
  const auto number = [&](const char* flag, double otherwise, const char* wanted, auto fits) {
    const auto text = value(flag);
    if (!text) return otherwise;
    mistakes.require(outputs.samples.has_value(), std::string(flag) + " needs --latents DIR.");
    const auto parsed = parse_number(*text);
    mistakes.require(parsed && fits(*parsed), std::string(flag) + " takes " + wanted + ", got \"" + *text + "\".");
    return parsed.value_or(otherwise);
  };
  outputs.sampling.steps = static_cast<int64_t>(number(
      kSamplingSteps, 50, "a number of steps", [](double steps) { return steps >= 1 && steps == std::floor(steps); }));
  outputs.sampling.shift = number(kSamplingShift, 1, "a number above 0", [](double shift) { return shift > 0; });
  outputs.sampling.guidance_scale = number(kGuidanceScale, 1, "a number", [](double) { return true; });
  return outputs;
}

void infer_latents(const InferenceRun& run, LatentOutputs outputs) {
  const Arguments& arguments = run.arguments;
  MultiModalModule& model = run.model();
  const LatentPatches patches = *model.latent_patches();
  const auto set = std::make_shared<LatentSet>(arguments.data_path.front());
  outputs.sampling.empty_text_features = set->empty_prompt().text_features;
  outputs.sampling.empty_text_mask = set->empty_prompt().text_mask;
  require(outputs.sampling.guidance_scale == 1 || outputs.sampling.empty_text_features.defined(),
          set->folder() + " has no empty_prompt.pt, which --guidance-scale needs; leave it out, or write the features "
                          "with launch/preprocess/preprocess_latents.py.");
  std::vector<OutputPath> paths;
  for (const auto& [flag, folder] :
       {std::pair(kSampledLatents, outputs.samples), std::pair(kPredictedVelocities, outputs.velocities)})
    if (folder) paths.push_back({flag, *folder, OutputPath::Kind::kSharedFolder});
  try_output_paths(paths, run.session.groups.world);
  const LatentDataset data(
      set, {.last = set->size(), .seq_length = *arguments.seq_length, .seed = arguments.seed, .shuffles = false},
      {.patches = patches});
  const auto noise = make_objective("flow-matching", {});
  const bool writes = run.ranks.sequence.is_whole() || run.ranks.sequence.group->rank() == 0;
  const int64_t batch = *arguments.micro_batch_size, count = data.size(), readers = run.readers->size();
  run.sink(Severity::kNotice, c10::str("Inferring on ", count, " samples of latents"));
  ProgressClock progress;
  const auto write = [&](const std::optional<std::string>& folder, const at::Tensor& found, int64_t first,
                         int64_t last) {
    const FeatureFolder features(*folder);
    for (int64_t i = first; writes && i < last; ++i)
      features.write(i, video_of_patches(found.select(1, i - first), grid_of(*set, i), patches.patch));
  };
  for (int64_t start = 0; start < count; start += batch * readers) {
    if (progress.is_due()) run.sink(Severity::kNotice, c10::str("Inferring: sample ", start, "/", count));
    const int64_t first = std::min(start + run.readers->rank() * batch, count), last = std::min(first + batch, count);
    std::vector<int64_t> mine(static_cast<size_t>(std::max<int64_t>(last - first, 1)));
    std::iota(mine.begin(), mine.end(), std::min(first, count - 1));  // a rank without samples helps the others
    const Batch whole = data.collate(mine, {.length_multiple = arguments.sequence_multiple()});
    if (outputs.velocities) {
      Batch noisy = whole;
      noise->prepare(noisy);
      write(outputs.velocities, predictions(model, std::move(noisy), run.ranks), first, last);
    }
    if (outputs.samples) write(outputs.samples, sample_latents(model, whole, outputs.sampling, run.ranks), first, last);
  }
  run.session.groups.world->barrier();
  for (const auto& path : paths) {
    if (run.is_first()) FeatureFolder(path.path).write_list(*set);
    run.sink(Severity::kNotice, c10::str(path.flag, ": ", count, " samples in ", path.path));
  }
}

}  // namespace megashard
