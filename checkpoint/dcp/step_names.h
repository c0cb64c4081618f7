#pragma once

#include <string>
#include <vector>

namespace megashard {

struct DcpMetadata;

/// Prefixes of weight names and of "state.<weight>.<buffer>" in the keys of a step. The defaults are ours and
/// Megatron's (state_dict_keys.h). PyTorch's dcp.save(model.state_dict()) and ROLL keep the weights at the top and the
/// optimizer beside them; others use "app.model." or "optim.".
struct StepNames {
  std::string model = "model.";
  std::string optimizer = "optimizer.";
  std::string dropped{};  ///< prefix that the step's names lack, as those of a headless network: "model."

  bool operator==(const StepNames&) const = default;
  /// The step's spelling of a key of state_dict_keys.h, for messages.
  std::string spelled(const std::string& key) const;
  /// A sentence for the log; empty if the prefixes are the defaults.
  std::string told() const;
};

/// Names of the model that a step is loaded for.
struct ModelNames {
  std::vector<std::string> weights{};     ///< empty if unknown
  std::vector<std::string> others{};      ///< further names that weights can have in a step, not all of them in one
  std::vector<std::string> parameters{};  ///< LoadOptions::parameters
};

/// Renames the tensors of a torch_dcp step, and other entries of the optimizer, to the keys of state_dict_keys.h. Uses
/// the prefix under which most of the model's weights are found, if these are at least half of them; otherwise none if
/// the weights are at the top of the nested state dict. Throws if state is numbered and cannot be assigned to
/// parameters.
StepNames take_own_names(DcpMetadata& metadata, const ModelNames& model);

/// Inverse, for writing: "model.<weight>" becomes "<weight>". Throws if that key exists already.
void take_bare_names(DcpMetadata& metadata);

}  // namespace megashard
