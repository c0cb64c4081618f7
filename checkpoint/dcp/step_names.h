#pragma once

#include <string>
#include <vector>

namespace megashard {

struct DcpMetadata;

/// What stands before a weight's name, and before "state.<weight>.<buffer>", in the keys of a step. Here and in
/// Megatron as state_dict_keys.h has it. PyTorch's dcp.save(model.state_dict()), and ROLL, keep the weights at the top
/// and the optimizer beside them; others have "app.model." or "optim.".
struct StepNames {
  std::string model = "model.";
  std::string optimizer = "optimizer.";
  std::string dropped{};  ///< "model.": the names lack it, as those of a network without its head do

  bool operator==(const StepNames&) const = default;
  /// A key of state_dict_keys.h as the step has it, for messages.
  std::string spelled(const std::string& key) const;
  /// A sentence for the log; empty where nothing is unusual.
  std::string told() const;
};

/// What is known of the model that a step is for.
struct ModelNames {
  std::vector<std::string> weights{};     ///< all names that weights may have; empty: nothing is known
  std::vector<std::string> parameters{};  ///< LoadOptions::parameters
};

/// Gives the tensors of a torch_dcp step, and what else lies with the optimizer, the keys of state_dict_keys.h: the
/// prefix under which most of the model's weights are found, or, where nothing is known of it, none if the weights are
/// at the top of the nested state dict. Throws where state is numbered and cannot be given to the parameters.
StepNames take_own_names(DcpMetadata& metadata, const ModelNames& model);

/// The other way, for writing: "model.<weight>" becomes "<weight>". Throws where that is another key.
void take_bare_names(DcpMetadata& metadata);

}  // namespace megashard
