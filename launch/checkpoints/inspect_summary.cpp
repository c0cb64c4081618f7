#include "launch/checkpoints/inspect_summary.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/files/file_io.h"
#include "checkpoint/values/value_text.h"
#include "launch/output/text_table.h"

namespace megashard {
namespace {

/// 134515008 as 134,515,008.
std::string with_commas(int64_t number) {
  auto text = std::to_string(number);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) text.insert(static_cast<size_t>(at), ",");
  return text;
}

std::string counted(int64_t number, const std::string& name) {
  return with_commas(number) + " " + name + (number == 1 ? "" : "s");
}

std::string size_text(int64_t bytes) {
  const bool is_large = bytes >= int64_t{10} << 30;
  return mebibytes(is_large ? bytes / 1024 : bytes) + (is_large ? " GiB" : " MiB");
}

std::string size_of(const CheckpointSummary::Part& part) {
  return size_text(part.bytes) + " of " + c10::Join(", ", part.dtypes);
}

std::string model_text(const CheckpointSummary& summary) {
  const auto& model = summary.model;
  if (model.tensors == 0) return "none";
  auto text = counted(model.tensors, "tensor") + ", " + counted(model.elements, "parameter") + ", " + size_of(model);
  if (summary.tied_names > 0) text += " (and " + counted(summary.tied_names, "further name") + " of tied ones)";
  return text;
}

std::string optimizer_text(const CheckpointSummary& summary) {
  if (summary.optimizer.tensors == 0) return "none";
  const auto buffers = c10::Join(", ", summary.buffers);
  return (buffers.empty() ? "" : buffers + ": ") + counted(summary.optimizer.tensors, "tensor") + ", " +
         size_of(summary.optimizer);
}

std::string saved_text(const CheckpointSummary& summary) {
  const auto files = "in " + counted(summary.data_files, "data file");
  return summary.ranks ? counted(*summary.ranks, "rank") + ", " + files : files;
}

std::string network_text(const CheckpointSummary& summary) {
  std::vector<std::string> parts;
  const auto add = [&](const char* name, const std::function<std::string(int64_t)>& text) {
    const auto found = summary.network.find(name);
    if (found != summary.network.end() && found->second > 0) parts.push_back(text(found->second));
  };
  const auto labelled = [](const std::string& label) {
    return [label](int64_t value) { return label + " " + with_commas(value); };
  };
  const auto plural = [](const std::string& name) { return [name](int64_t value) { return counted(value, name); }; };
  add("num_layers", plural("layer"));
  add("hidden_size", labelled("hidden size"));
  add("num_attention_heads", plural("head"));
  add("num_query_groups", plural("key-value head"));
  add("num_experts", plural("expert"));
  add("vocab_size", labelled("vocabulary"));
  add("seq_length", labelled("sequences of"));
  add("lora_r", labelled("adapters of rank"));
  return (summary.family.empty() ? "" : printable(summary.family) + ": ") + c10::Join(", ", parts);
}

std::string title_of(const CheckpointReader& reader) {
  const auto format = reader.format();
  const bool folder = is_directory(reader.path());
  const auto what = format == "safetensors" ? (folder ? "Hugging Face model" : "safetensors file")
                    : folder                ? format + " step"
                                            : format + " file";
  return what + " " + printable(reader.path());
}

}  // namespace

void print_checkpoint_summary(const CheckpointReader& reader, const CheckpointSummary& summary) {
  std::cout << title_of(reader);
  if (summary.iteration) std::cout << ", iteration " << *summary.iteration;
  std::cout << "\n";
  const auto line = [](const char* title, const std::string& text) {
    if (!text.empty()) std::cout << "  " << title << text << "\n";
  };
  const bool step = reader.format() == "torch_dcp" || reader.format() == "torch_dist";
  line("model          ", model_text(summary));
  line("network        ", network_text(summary));
  if (step || summary.optimizer.tensors > 0) line("optimizer      ", optimizer_text(summary));
  const auto random = static_cast<int64_t>(summary.random_ranks.size());
  if (step) line("random states  ", random == 0 ? "none" : "of " + counted(random, "rank"));
  if (step) line("arguments      ", summary.has_arguments ? "of the run" : "none");
  if (step) line("saved by       ", saved_text(summary));
  int64_t bytes = 0;
  for (const auto& file : summary.files) bytes += std::max<int64_t>(file.second, 0);
  line("files          ", std::to_string(summary.files.size()) + ", " + size_text(bytes));
}

nlohmann::ordered_json checkpoint_summary_json(const CheckpointSummary& summary) {
  nlohmann::ordered_json json = {{"parameters", summary.model.elements},
                                 {"bytes", summary.model.bytes},
                                 {"dtypes", summary.model.dtypes},
                                 {"optimizer", summary.buffers},
                                 {"random_states", summary.random_ranks.size()},
                                 {"arguments", summary.has_arguments},
                                 {"ranks", nullptr},
                                 {"family", summary.family},
                                 {"network", summary.network}};
  if (summary.ranks) json["ranks"] = *summary.ranks;
  return json;
}

}  // namespace megashard
