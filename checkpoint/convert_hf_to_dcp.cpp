#include "checkpoint/convert_hf_to_dcp.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/hf_weights.h"
#include "checkpoint/torch_archive.h"
#include "checkpoint/value_paths.h"

namespace megashard {
namespace {

constexpr double kCheckpointVersion = 3.0;

/// A weight of the Hugging Face model and the key under which it is stored.
struct Conversion {
  std::string name;
  std::string key;
};

std::string key_of(const HfToDcpOptions& options, const std::string& name) {
  return "model." + options.dcp_prefix + name.substr(options.hf_prefix.size());
}

/// By safetensors file, in the order of its data.
std::vector<std::vector<Conversion>> plan(const HfToDcpOptions& options, const HfWeights& weights) {
  std::vector<std::vector<Conversion>> files(static_cast<size_t>(weights.file_count()));
  size_t count = 0;
  for (const auto& info : weights.tensors()) {
    if (!info.name.starts_with(options.hf_prefix)) continue;
    files[static_cast<size_t>(weights.file_of(info.name))].push_back(
        {info.name, key_of(options, info.name)});
    ++count;
  }
  TORCH_CHECK(count > 0, "no weight in ", options.hf_dir, " has a name that begins with --hf-prefix \"",
              options.hf_prefix, "\"; the first is ", weights.tensors().empty() ? "not there" : weights.tensors()[0].name);
  for (const auto& [target, source] : options.tie_weight_mapping) {
    TORCH_CHECK(weights.contains(source), "--tie-weight-mapping ", target, "=", source, ": ", options.hf_dir,
                " has no weight ", source);
    TORCH_CHECK(target.starts_with(options.hf_prefix), "--tie-weight-mapping ", target, "=", source,
                ": the target does not begin with --hf-prefix \"", options.hf_prefix, "\"");
    if (weights.contains(target)) continue;  // stored already
    files[static_cast<size_t>(weights.file_of(source))].push_back(
        {source, key_of(options, target)});
  }
  return files;
}

DcpEntry write_weight(const Conversion& conversion, const HfToDcpOptions& options,
                      const HfWeights& weights, OutputFile& file, const std::string& file_name) {
  auto tensor = weights.tensor(conversion.name);
  if (options.to_bf16 && tensor.is_floating_point()) tensor = tensor.to(at::kBFloat16);
  const auto range = write_stored_tensor(file, tensor);
  const auto sizes = tensor.sizes().vec();
  const DcpChunk chunk{std::vector<int64_t>(sizes.size(), 0), sizes, {file_name, range}};
  return {
      conversion.key, tensor_path(conversion.key), true, tensor.scalar_type(), sizes, {chunk}, {}};
}

}  // namespace

void convert_hf_to_dcp(const HfToDcpOptions& options, const ConvertProgress& progress) {
  const HfWeights weights(options.hf_dir);
  const auto files = plan(options, weights);
  auto step = StepWriter::release(options.dcp_dir);
  step.begin();
  DcpMetadata metadata;
  std::vector<ManifestFile> written;
  for (size_t i = 0; i < files.size(); ++i) {
    const auto file_name = "__" + std::to_string(i) + "_0.distcp";
    OutputFile file(step.folder() + "/" + file_name);
    if (i == 0) {
      const auto range = write_stored_value(file, kCheckpointVersion);
      metadata.entries.push_back({"checkpoint_version",
                                  {"checkpoint_version"},
                                  false,
                                  at::kFloat,
                                  {},
                                  {},
                                  {file_name, range}});
    }
    for (const auto& conversion : files[i]) {
      metadata.entries.push_back(write_weight(conversion, options, weights, file, file_name));
    }
    file.sync_and_close();
    written.push_back(manifest_entry(file));
    progress("file " + std::to_string(i + 1) + " of " + std::to_string(files.size()) + ": " +
             std::to_string(files[i].size()) + " tensors, " +
             std::to_string(file.position() >> 20) + " MiB");
  }
  written.push_back(write_dcp_metadata(step.folder(), metadata));
  step.commit(written);
}

}  // namespace megashard
