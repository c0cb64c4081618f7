#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/training/latent_sampling.h"
#include "launch/infer/inference_run.h"

namespace megashard {

/// What `megashard infer` writes for a model of latents: folders of features.
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
