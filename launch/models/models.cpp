#include <c10/util/StringUtil.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "launch/checkpoints/flag_mistakes.h"
#include "launch/output/help_format.h"
#include "launch/output/text_table.h"
#include "launch/shell/subcommands.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

bool goes(const std::function<void()>& check) {
  try {
    check();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

/// A small model of the family, by the first additions to a common config.json that it takes: its kinds of layers, a
/// text model of its own, or the size of a head.
Network small_network(const ModelFamily& family) {
  constexpr int64_t kHidden = 1024, kHeads = 8;
  const nlohmann::ordered_json tower = {{"out_hidden_size", kHidden},
                                        {"deepstack_visual_indexes", {0}},
                                        {"image_size", 256},
                                        {"patch_size", 16},
                                        {"vision_use_head", false}};
  nlohmann::ordered_json config = {{"model_type", family.model_type},
                                   {"vocab_size", 256000},
                                   {"hidden_size", kHidden},
                                   {"intermediate_size", kHidden},
                                   {"num_hidden_layers", 4},
                                   {"num_attention_heads", kHeads},
                                   {"num_key_value_heads", kHeads},
                                   {"num_experts_per_tok", 2},
                                   {"layers_block_type", {"linear_attention", "full_attention", "mlp", "moe"}},
                                   {"vision_config", tower},
                                   {"audio_config", {{"output_dim", kHidden}}}};
  auto text = config;
  text.erase("model_type");
  Network network;
  const nlohmann::ordered_json additions[] = {{{"layer_types", {"conv", "full_attention", "conv", "full_attention"}}},
                                              nlohmann::ordered_json::object(),
                                              {{"text_config", text}, {"llm_config", text}}};
  for (const auto& addition : additions) {
    auto whole = config;
    whole.update(addition);
    if (goes([&] { network = network_from_hf({whole, family.model_type}); })) return network;
  }
  config["head_dim"] = kHidden / kHeads;
  return network_from_hf({config, family.model_type});
}

std::string answer(bool yes) { return yes ? "yes" : "-"; }

/// The modules in the residual branches of its layers: "linear_attn, self_attn, mlp".
std::string parts_of(const Network& network) {
  std::vector<std::string> names;
  for (const auto& layer : network.layers) {
    for (const auto& branch : layer.branches) {
      if (std::ranges::count(names, branch.name) == 0) names.push_back(branch.name);
    }
  }
  return c10::Join(", ", names);
}

std::vector<std::string> row_of(const ModelFamily& family) {
  const auto network = small_network(family);
  const auto& name = family.model_type;
  std::vector<std::string> towers;
  if (network.encoder) {
    for (const auto& tower : network.encoder->towers()) towers.push_back(tower.name);
  }
  const bool is_text = towers.empty();
  const auto every_part = [&](const std::function<void(const PartSpec&)>& check) {
    return goes([&] { for_each_part(network, check); });
  };
  return {name,
          family.architecture,
          parts_of(network),
          answer(network.config.moe.num_experts > 0),
          is_text ? "-" : c10::Join(", ", towers),
          answer(is_text && every_part([&](const PartSpec& part) { part.check_tensor_ranks(name); })),
          answer(every_part([&](const PartSpec& part) { part.check_sequence_ranks(name, 2, 1); })),
          answer(is_text && every_part([&](const PartSpec& part) { part.check_sequence_ring(name); })),
          answer(family.has_megatron_layout)};
}

}  // namespace

int run_models(int argc, char** argv) {
  CLI::App app("the families of models that --hf-model can name, and the strategies that each can be trained by",
               "megashard models");
  app.formatter(std::make_shared<HelpFormat>());
  if (!parse_words(app, argc, argv, "", "; `megashard models --help` lists the flags")) return 0;
  TextTable table({"model_type", "class", "parts of a layer", "experts", "towers", "tensor parallel", "Ulysses", "ring",
                   "torch_dist layout"});
  for (const auto& family : model_families()) table.add(row_of(family));
  table.print();
  return 0;
}

}  // namespace megashard
