// libFuzzer's entry for every parser of files that come from elsewhere. The first argument,
// --target=NAME, chooses one. An error message (c10::Error, UsageError) is the right answer to a damaged
// file; any other exception, a report of a sanitizer, or more memory than the limits of
// tests/fuzz/run is a fault.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/strict_json.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/readers/torch_file.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/torch_dist/torch_dist_reader.h"
#include "checkpoint/values/numpy_value.h"
#include "checkpoint/values/pickle_reader.h"
#include "checkpoint/values/pickle_writer.h"
#include "framework/arguments/nearest_name.h"
#include "framework/data/conversation_dataset.h"
#include "framework/data/indexed_dataset.h"
#include "framework/data/prime_rollouts.h"
#include "framework/modules/fsdp2_config.h"
#include "launch/arguments/argument_file.h"
#include "launch/arguments/command_line.h"
#include "launch/roll/roll_worker.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// A file in a folder of this process. Its content changes from run to run; the file stays open, as
/// opening costs more than most parsers take.
class ChangingFile {
 public:
  explicit ChangingFile(const std::string& name) : path_(folder() + "/" + name) {
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor_ < 0) std::abort();
  }
  void write(std::string_view bytes) const {
    const auto size = static_cast<int64_t>(bytes.size());
    if (::pwrite(descriptor_, bytes.data(), bytes.size(), 0) != size || ::ftruncate(descriptor_, size) != 0)
      std::abort();
  }
  const std::string& path() const { return path_; }

  static const std::string& folder() {
    static const std::string folder = [] {
      auto pattern = (std::filesystem::temp_directory_path() / "fuzz_XXXXXX").string();
      if (::mkdtemp(pattern.data()) == nullptr) std::abort();
      return pattern;
    }();
    return folder;
  }

 private:
  std::string path_;
  int descriptor_ = -1;
};

/// What was read is written, read and written again: the same bytes.
void fuzz_pickle(std::string_view bytes) {
  const auto value = read_pickle(bytes, "fuzz");
  numpy_tensor(value);
  const auto written = write_pickle(value);
  if (write_pickle(read_pickle(written, "written here")) != written) std::abort();
}

void fuzz_metadata(std::string_view bytes) {
  for (const auto& entry : parse_dcp_metadata(bytes, "fuzz").entries) {
    for (const auto& location : entry.locations())
      if (!is_plain_file_name(location.file)) std::abort();
  }
}

void fuzz_manifest(std::string_view bytes) {
  for (const auto& file : parse_manifest(bytes, "fuzz").files) {
    const bool elsewhere = file.name == ".." || file.name.find('/') != std::string::npos;
    if (elsewhere || file.bytes < 0) std::abort();
  }
}

void fuzz_torch_dist(std::string_view bytes) {
  view_torch_dist(parse_dcp_metadata(bytes, "fuzz"), DcpKnownValue{Dict{}}, "/nowhere");
}

/// .metadata beside a file with two tensors and a value, as torch.distributed.checkpoint wrote them
/// (make_corpus.py): what it says about places in that file is followed. The data come first, then
/// .metadata, whose length stands in the last four bytes.
void fuzz_dcp_reader(std::string_view bytes) {
  constexpr size_t kLength = 4;
  if (bytes.size() < kLength) return;
  uint32_t length = 0;
  std::memcpy(&length, bytes.data() + bytes.size() - kLength, kLength);
  bytes.remove_suffix(kLength);
  length = std::min<uint32_t>(length, static_cast<uint32_t>(bytes.size()));
  static const ChangingFile data("__0_0.distcp"), metadata(".metadata");
  data.write(bytes.substr(0, bytes.size() - length));
  metadata.write(bytes.substr(bytes.size() - length));
  DcpReader reader(ChangingFile::folder(), CheckpointFormat::kTorchDcp, read_dcp_metadata(ChangingFile::folder()));
  for (const auto& entry : reader.entries()) {
    const auto& key = entry.key;
    try {
      if (reader.is_value(key)) {
        reader.read_value(key);
      } else if (reader.read_tensor(key).sizes() != reader.find(key)->sizes) {
        std::abort();
      }
    } catch (const c10::Error&) {  // the others may be whole
    }
  }
}

/// common.pt beside the buffers of a weight of two layers.
void fuzz_torch_dist_common(std::string_view bytes) {
  static const auto stored = [] {
    const DcpTensor tensor{.sizes = {2, 4},
                           .chunks = {{.offsets = {0, 0}, .sizes = {1, 4}}, {.offsets = {1, 0}, .sizes = {1, 4}}}};
    return DcpMetadata{{{.key = "optimizer.state.exp_avg.decoder.layers.mlp.weight", .stored = tensor}}};
  }();
  view_torch_dist(stored, DcpKnownValue{read_pickle(bytes, "fuzz")}, "/nowhere");
}

void fuzz_torch_dist_config(std::string_view bytes) { parse_sharded_backend(bytes, "fuzz"); }

void fuzz_torch_file(std::string_view bytes) {
  static const ChangingFile on_disk("file.pt");
  on_disk.write(bytes);
  TorchFile file(on_disk.path());
  for (const auto& [name, entry] : file.archive().entries()) {
    const auto content = file.archive().read(name, static_cast<int64_t>(bytes.size()));
    if (content.size() != static_cast<size_t>(entry.size)) std::abort();
  }
  for (const auto& info : file.tensors()) file.read_tensor(info.name);
}

void fuzz_stored_value(std::string_view bytes) {
  static const ChangingFile on_disk("value.pt");
  on_disk.write(bytes);
  const InputFile file(on_disk.path());
  read_stored_value(file, {0, file.size()});
}

void fuzz_safetensors(std::string_view bytes) {
  const auto content = parse_safetensors(bytes, "fuzz");
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const auto end = content.offsets[i] + tensor_bytes(content.tensors[i]);
    if (content.offsets[i] < 8 || end > static_cast<int64_t>(bytes.size())) std::abort();
  }
}

void fuzz_tracker(std::string_view bytes) { parse_tracker(bytes, "fuzz"); }

void fuzz_index(std::string_view bytes) {
  for (const auto& [name, file] : parse_weight_map(bytes, "fuzz"))
    if (!is_plain_file_name(file)) std::abort();
}

void fuzz_hf_config(std::string_view bytes) {
  decoder_config_from_hf(HfConfig(parse_ordered_json(bytes, "fuzz"), "fuzz"));
}

void fuzz_token_index(std::string_view bytes) {
  static const ChangingFile bin("tokens.bin"), index("tokens.idx");
  static const bool once = (bin.write("0123456789abcdef0123456789abcdef"), true);
  static_cast<void>(once);
  index.write(bytes);
  const IndexedDataset tokens(index.path().substr(0, index.path().rfind('.')));
  for (int64_t i = 0; i < static_cast<int64_t>(tokens.sequence_lengths().size()); ++i) {
    std::vector<int64_t> ids(static_cast<size_t>(tokens.sequence_lengths()[static_cast<size_t>(i)]));
    tokens.copy_tokens(i, 0, ids);
  }
}

void fuzz_prime_rollouts(std::string_view bytes) {
  static const ChangingFile file("rank_0.bin");
  file.write(bytes);
  const PrimeRollouts rollouts(file.path());
  for (int64_t i = 0; i < rollouts.size(); ++i) rollouts.collate({i}, {.seq_length = 64, .vocab_size = 1000});
}

void fuzz_picture_set(std::string_view bytes) {
  static const ChangingFile file("set.vision.safetensors");
  file.write(bytes);
  const auto set = std::make_shared<ConversationSet>(file.path().substr(0, file.path().find(".vision.")));
  int64_t seen = 0;
  for (int64_t i = 0; i < set->size(); ++i) {
    const auto sample = set->sample(i);
    for (const auto token : sample.tokens) seen += token;
    for (const auto learnt : sample.loss_mask) seen += learnt;
    for (const auto& items : sample.items) seen += items.sum().isnan().item<bool>() ? 1 : 0;
  }
  const ConversationDataset samples(set, {.split_name = "train", .last = set->size(), .seq_length = 64});
  static_cast<void>(seen + samples.size());
}

void fuzz_data_args(std::string_view bytes) {
  static const ChangingFile file("data_args.txt");
  file.write(bytes);
  for (const auto& word : read_words(file.path(), "--data-args-path"))
    if (word.find_first_of(" \t\n\v\f\r") != word.npos) std::abort();
}

void fuzz_fsdp2_yaml(std::string_view bytes) {
  parse_fsdp2_config(std::string(bytes), "fuzz", Strictness::kWarn, [](auto, const auto&) {});
}

void fuzz_argument_file(std::string_view bytes) {
  Arguments arguments;
  Mistakes mistakes;
  parse_argument_file(std::string(bytes), "fuzz", arguments, mistakes);
}

void fuzz_roll_yaml(std::string_view bytes) {
  Arguments arguments;
  parse_roll_worker(std::string(bytes), "fuzz", "actor_train", arguments);
}

void fuzz_command_line(std::string_view bytes) {
  std::vector<std::string> words{"pretrain"};
  for (size_t at = 0; at < bytes.size();) {
    const auto end = std::min(bytes.find('\n', at), bytes.size());
    words.emplace_back(bytes.substr(at, end - at));
    at = end + 1;
  }
  std::vector<const char*> argv;
  for (const auto& word : words) argv.push_back(word.c_str());
  try {
    parse_arguments(static_cast<int>(argv.size()), argv.data());
  } catch (const HelpRequested&) {
  }
}

struct Target {
  std::string_view name;
  void (*run)(std::string_view bytes);
};

constexpr Target kFuzzTargets[] = {
    {"pickle", fuzz_pickle},
    {"metadata", fuzz_metadata},
    {"dcp_reader", fuzz_dcp_reader},
    {"torch_dist", fuzz_torch_dist},
    {"torch_dist_common", fuzz_torch_dist_common},
    {"torch_dist_config", fuzz_torch_dist_config},
    {"manifest", fuzz_manifest},
    {"torch_file", fuzz_torch_file},
    {"stored_value", fuzz_stored_value},
    {"safetensors", fuzz_safetensors},
    {"tracker", fuzz_tracker},
    {"index", fuzz_index},
    {"hf_config", fuzz_hf_config},
    {"token_index", fuzz_token_index},
    {"picture_set", fuzz_picture_set},
    {"prime_rollouts", fuzz_prime_rollouts},
    {"data_args", fuzz_data_args},
    {"fsdp2_yaml", fuzz_fsdp2_yaml},
    {"argument_file", fuzz_argument_file},
    {"roll_yaml", fuzz_roll_yaml},
    {"command_line", fuzz_command_line},
};

const Target* chosen = nullptr;

}  // namespace

/// Suggestions read no files, and would take nine tenths of the time of whatever looks up names.
std::string did_you_mean(std::string_view, const std::vector<std::string>&) { return ""; }
std::optional<std::string> nearest_name(std::string_view, const std::vector<std::string>&) { return {}; }

}  // namespace megashard

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  constexpr std::string_view kFlag = "--target=";
  const std::string_view flag = *argc > 1 ? (*argv)[1] : "";
  for (const auto& target : megashard::kFuzzTargets) {
    if (flag == "--list") std::printf("%s\n", std::string(target.name).c_str());
    if (flag.starts_with(kFlag) && flag.substr(kFlag.size()) == target.name) megashard::chosen = &target;
  }
  if (megashard::chosen == nullptr) std::exit(flag == "--list" ? 0 : 2);
  // A thrown c10::Error otherwise looks at the whole stack, which is most of a run's time.
  c10::SetStackTraceFetcher([] { return std::string(); });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    megashard::chosen->run({reinterpret_cast<const char*>(data), size});
  } catch (const c10::Error&) {
  } catch (const megashard::UsageError&) {
  }
  return 0;
}
