#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/training/latent_sampling.h"
#include "launch/infer/inference_run.h"

namespace megashard {

/// Names the folders of features that `megashard infer` writes for a model of latents.
struct LatentOutputs {
  std::optional<std::string> samples, velocities;
  LatentSampling sampling{};

  bool is_asked() const { return samples || velocities; }
};

/// The flags and their descriptions.
std::vector<OwnFlag> latent_flags();
LatentOutputs latent_outputs(const std::map<std::string, std::string>& own, Mistakes& mistakes);

/// Runs the model over the folder of --data-path. Collective.
void infer_latents(const InferenceRun& run, LatentOutputs outputs);

}  // namespace megashard
