#include "checkpoint/hugging_face/missing_weights.h"

#include <filesystem>
#include <system_error>

#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/steps/folder_content.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

bool has_file(const std::string& directory, const std::string& start, const std::string& end) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(start) && name.ends_with(end)) return true;
  }
  return false;
}

}  // namespace

std::string why_no_weights(const std::string& directory) {
  if (hf_save_was_cut_short(directory))
    return directory + " has neither model.safetensors nor model.safetensors.index.json: a save into it was "
                       "cut short; save the model into it again";
  if (has_file(directory, "model-", ".safetensors"))
    return directory + " has pieces of a model but no model.safetensors.index.json, which names them; fetch "
                       "the directory again, whole";
  if (has_file(directory, "pytorch_model", ".bin"))
    return directory +
           " has pickled weights (pytorch_model*.bin) only; write safetensors once, with "
           "transformers: AutoModelForCausalLM.from_pretrained(\"" +
           directory + "\").save_pretrained(\"NEW_DIR\")";
  if (has_file(directory, "adapter_model", ""))
    return directory +
           " holds PEFT adapters, not a model; merge them first, with peft: "
           "PeftModel.from_pretrained(base_model, \"" +
           directory + "\").merge_and_unload().save_pretrained(\"NEW_DIR\")";
  if (has_file(directory, "", ".gguf"))
    return directory + " has a GGUF file, which is for inference by llama.cpp; give the original model's "
                       "directory, with safetensors";
  const auto kind = content_of(directory).kind;
  if (kind == FolderContent::Kind::kStep || kind == FolderContent::Kind::kRun)
    return directory + (kind == FolderContent::Kind::kRun ? " is a run's folder" : " is a step's folder") +
           ", and no Hugging Face directory; megashard convert dcp_to_hf and torch_dist_to_hf make "
           "one of a step";
  return directory + " has neither model.safetensors nor model.safetensors.index.json; save the model with "
                     "transformers' save_pretrained first, or fetch its weights";
}

}  // namespace megashard
