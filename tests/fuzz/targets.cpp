// libFuzzer's entry for every parser of files that come from elsewhere. The first argument,
// --target=NAME, chooses one. A sentence (c10::Error, UsageError) is the right answer to a damaged
// file; any other exception, a report of a sanitizer, or more memory than the limits of
// tests/fuzz/run is a fault.
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/values/numpy_value.h"
#include "checkpoint/values/pickle_reader.h"
#include "checkpoint/values/pickle_writer.h"
#include "checkpoint/values/torch_archive.h"
#include "framework/arguments/arguments.h"
#include "framework/data/indexed_dataset.h"
#include "framework/modules/fsdp2_config.h"
#include "launch/argument_file.h"
#include "launch/command_line.h"
#include "models/model_config.h"

namespace megashard {
namespace {

/// A file in memory, under a path that open() takes.
class FileOfBytes {
 public:
  explicit FileOfBytes(std::string_view bytes) : descriptor_(::memfd_create("fuzz", 0)) {
    if (::write(descriptor_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
      std::abort();
  }
  ~FileOfBytes() { ::close(descriptor_); }
  FileOfBytes(const FileOfBytes&) = delete;
  FileOfBytes& operator=(const FileOfBytes&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

/// A folder of this process in which one file changes from run to run.
std::string folder_with(const std::string& name, std::string_view bytes) {
  static const std::string folder = [] {
    auto pattern = (std::filesystem::temp_directory_path() / "fuzz_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    return pattern;
  }();
  const auto path = folder + "/" + name;
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size())
    std::abort();
  std::fclose(file);
  return folder;
}

/// What was read is written, read and written again: the same bytes.
void fuzz_pickle(std::string_view bytes) {
  const auto value = read_pickle(bytes, "fuzz");
  numpy_tensor(value);
  const auto written = write_pickle(value);
  if (write_pickle(read_pickle(written, "written here")) != written) std::abort();
}

void fuzz_metadata(std::string_view bytes) {
  for (const auto& entry : parse_dcp_metadata(bytes, "fuzz").entries) {
    if (!entry.location.file.empty() && !is_plain_file_name(entry.location.file)) std::abort();
  }
}

void fuzz_manifest(std::string_view bytes) {
  for (const auto& file : parse_manifest(bytes, "fuzz").files) {
    const bool elsewhere = file.name == ".." || file.name.find('/') != std::string::npos;
    if (elsewhere || file.bytes < 0) std::abort();
  }
}

void fuzz_archive(std::string_view bytes) {
  const FileOfBytes memory(bytes);
  const InputFile file(memory.path());
  const FileRange all{0, file.size()};
  const TorchArchive archive(file, all);
  for (const auto& [name, entry] : archive.entries()) {
    if (archive.read(name, file.size()).size() != static_cast<size_t>(entry.size)) std::abort();
  }
  const auto stored = stored_tensor(archive, read_root(archive));
  if (stored) read_rows(file, *stored, 0, stored->sizes.empty() ? 1 : stored->sizes[0]);
}

void fuzz_safetensors(std::string_view bytes) {
  const FileOfBytes memory(bytes);
  const SafetensorsFile file(memory.path());
  for (const auto& info : file.tensors()) file.tensor(info.name).view(-1).view(at::kByte).sum();
}

void fuzz_tracker(std::string_view bytes) {
  latest_step(folder_with("latest_checkpointed_iteration.txt", bytes));
}

void fuzz_index(std::string_view bytes) {
  const HfWeights weights(folder_with("model.safetensors.index.json", bytes));
}

void fuzz_hf_config(std::string_view bytes) {
  decoder_config_from_hf(folder_with("config.json", bytes));
}

void fuzz_token_index(std::string_view bytes) {
  folder_with("tokens.bin", "0123456789abcdef0123456789abcdef");
  const IndexedDataset tokens(folder_with("tokens.idx", bytes) + "/tokens");
  for (int64_t i = 0; i < static_cast<int64_t>(tokens.sequence_lengths().size()); ++i) {
    std::vector<int64_t> ids(
        static_cast<size_t>(tokens.sequence_lengths()[static_cast<size_t>(i)]));
    tokens.copy_tokens(i, 0, ids);
  }
}

void fuzz_fsdp2_yaml(std::string_view bytes) {
  parse_fsdp2_config(std::string(bytes), "fuzz", Strictness::kWarn, [](auto, const auto&) {});
}

void fuzz_argument_file(std::string_view bytes) {
  Arguments arguments;
  read_argument_file(folder_with("arguments.yaml", bytes) + "/arguments.yaml", arguments);
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

constexpr Target kTargets[] = {
    {"pickle", fuzz_pickle},
    {"metadata", fuzz_metadata},
    {"manifest", fuzz_manifest},
    {"archive", fuzz_archive},
    {"safetensors", fuzz_safetensors},
    {"tracker", fuzz_tracker},
    {"index", fuzz_index},
    {"hf_config", fuzz_hf_config},
    {"token_index", fuzz_token_index},
    {"fsdp2_yaml", fuzz_fsdp2_yaml},
    {"argument_file", fuzz_argument_file},
    {"command_line", fuzz_command_line},
};

const Target* chosen = nullptr;

}  // namespace
}  // namespace megashard

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  constexpr std::string_view kFlag = "--target=";
  const std::string_view flag = *argc > 1 ? (*argv)[1] : "";
  for (const auto& target : megashard::kTargets) {
    if (flag == "--list") std::printf("%s\n", std::string(target.name).c_str());
    if (flag.starts_with(kFlag) && flag.substr(kFlag.size()) == target.name)
      megashard::chosen = &target;
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
