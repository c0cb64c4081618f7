// For each DIR of the command line: builds the model of DIR/config.json (or of the flags in DIR/flags.json, a list of
// lists), loads DIR/*.safetensors and runs DIR/input.bin (safetensors: tokens, labels [B, T] int64, optional
// position_ids, token_mask and document_lengths). Writes DIR/output.bin (safetensors): logits, loss [B, T] (zero at
// masked tokens), and grad.NAME of the mean loss for every parameter; and DIR/flops.txt: of a token. With --each as the
// first argument, errors go to DIR/error.txt and diagnostics to DIR/told.txt.
#include <ATen/core/grad_mode.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/arguments/argument_table.h"
#include "framework/diagnostics.h"
#include "models/decoder/decoder_model.h"
#include "models/hugging_face/load_hf_weights.h"
#include "models/register_models.h"

namespace {

using Entries = std::vector<std::pair<std::string, at::Tensor>>;

void write(const std::string& path, const Entries& entries) {
  std::vector<megashard::TensorInfo> infos;
  for (const auto& [name, tensor] : entries) infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  megashard::SafetensorsWriter writer(path, infos);
  for (const auto& info : writer.tensors()) {
    for (const auto& [name, tensor] : entries) {
      if (name == info.name) writer.write(tensor);
    }
  }
  writer.finish();
}

megashard::Arguments network_of(const std::string& dir) {
  megashard::Arguments arguments;
  std::ifstream file(dir + "/flags.json");
  if (!file) {
    arguments.hf_model = dir;
    return arguments;
  }
  for (auto words : nlohmann::json::parse(file).get<std::vector<std::vector<std::string>>>()) {
    const auto* option = megashard::find_option(words.front());
    words.erase(words.begin());
    megashard::set_option(*option, words.empty() ? std::vector<std::string>{"true"} : words, arguments);
  }
  arguments.padded_vocab_size = arguments.vocab_size;
  return arguments;
}

void run(const std::string& dir, const megashard::DiagnosticSink& sink) {
  megashard::ModelRegistry registry;
  megashard::register_models(registry);
  const megashard::Arguments arguments = network_of(dir);
  const auto model = registry.create(arguments);
  megashard::load_hf_weights(*model, dir, sink);

  const megashard::SafetensorsFile file(dir + "/input.bin");
  megashard::Batch input;
  input.set(megashard::kTokens, file.tensor("tokens"));
  if (file.contains("position_ids")) input.set(megashard::kPositionIds, file.tensor("position_ids"));
  if (file.contains("token_mask")) input.set(megashard::kTokenMask, file.tensor("token_mask"));
  if (file.contains("document_lengths")) input.document_lengths = file.tensor("document_lengths");
  const auto masked = [&](const at::Tensor& x) {
    const auto mask = input.token_mask();
    return mask.defined() ? x * mask : x;
  };
  for (const auto& info : file.tensors()) {
    if (info.name.starts_with("extra.")) input.set(info.name.substr(6), file.tensor(info.name), megashard::Axis::kItem);
  }
  Entries outputs;
  {
    const at::NoGradGuard no_grad;
    outputs.emplace_back("logits", (*model)(input).logits.contiguous());
  }
  input.set(megashard::kLabels, file.tensor("labels"));
  const megashard::ModelOutput output = (*model)(input);
  at::Tensor each = output.token_losses;
  for (const megashard::AuxTerm& term : output.aux) each = each + term.value;  // as in transformers' mean loss
  const auto loss = masked(each);
  loss.mean().backward();
  outputs.emplace_back("loss", loss.detach());
  for (const auto& item : model->named_parameters()) {
    if (item.value().grad().defined())  // text alone gives a vision tower no gradient
      outputs.emplace_back("grad." + item.key(), item.value().grad());
  }
  write(dir + "/output.bin", outputs);
  std::ofstream(dir + "/flops.txt") << model->training_flops(/*sequences=*/1, /*sequence_length=*/1);
}

}  // namespace

int main(int argc, char** argv) {
  const bool each = argc > 1 && argv[1] == std::string("--each");
  for (int i = 2; each && i < argc; ++i) {
    const std::string dir = argv[i];
    const auto told = [&](megashard::Severity, const std::string& text) {
      std::ofstream(dir + "/told.txt", std::ios::app) << text << '\n';
    };
    try {
      run(dir, told);
    } catch (const c10::Error& error) {
      std::ofstream(dir + "/error.txt") << error.what_without_backtrace();
    } catch (const std::exception& error) {
      std::ofstream(dir + "/error.txt") << error.what();
    }
  }
  try {
    for (int i = 1; !each && i < argc; ++i) run(argv[i], [](auto, const auto&) {});
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
  return 0;
}
