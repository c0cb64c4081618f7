#include "framework/data/indexed_dataset.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <vector>

#include "framework/data/conversation_dataset.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

static_assert(std::endian::native == std::endian::little, ".idx and .bin are little endian");

constexpr const char* kRebuild =
    "; write the set again with launch/preprocess/preprocess_data.py, or copy both files again";

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <typename T>
void copy_as(const std::byte* from, std::span<int64_t> out) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<int64_t>(load<T>(from + i * sizeof(T)));
}

std::span<const std::byte> bytes_of(const MappedFile& file) {
  return {reinterpret_cast<const std::byte*>(file.data()), static_cast<size_t>(file.size())};
}

std::string path_of_prefix(const std::string& prefix, const char* suffix) {
  if (!path_exists(prefix + ".idx") || !path_exists(prefix + ".bin")) throw UsageError(why_no_tokens(prefix));
  return prefix + suffix;
}

bool begins_with(std::span<const std::byte> bytes, const void* text, size_t size) {
  return bytes.size() >= size && std::memcmp(bytes.data(), text, size) == 0;
}

// Throws if the file is a Git LFS pointer.
void refuse_pointer(std::span<const std::byte> bytes, const std::string& path) {
  constexpr std::string_view kPointer = "version https://git-lfs";
  TORCH_CHECK(!begins_with(bytes, kPointer.data(), kPointer.size()), path,
              " is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`");
}

}  // namespace

int64_t token_bytes(TokenType type) {
  switch (type) {
    case TokenType::kUInt8:
    case TokenType::kInt8:
      return 1;
    case TokenType::kInt16:
    case TokenType::kUInt16:
      return 2;
    case TokenType::kInt32:
    case TokenType::kFloat32:
      return 4;
    case TokenType::kInt64:
    case TokenType::kFloat64:
      return 8;
  }
  return 0;
}

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix), index_(path_of_prefix(prefix, ".idx")), bin_(path_of_prefix(prefix, ".bin")) {
  read_index();
  check_sequences();
}

void IndexedDataset::read_index() {
  const std::string path = prefix_ + ".idx";
  const auto bytes = bytes_of(index_);
  refuse_pointer(bytes, path);
  refuse_pointer(bytes_of(bin_), prefix_ + ".bin");
  TORCH_CHECK(!begins_with(bytes_of(bin_), kIndexMagic, sizeof(kIndexMagic)), prefix_,
              ".bin is an index: the two files of the set are swapped; rename them");
  TORCH_CHECK(bytes.size() >= kIndexHeaderBytes, path, " is truncated: ", bytes.size(),
              " bytes, the header alone takes ", kIndexHeaderBytes, kRebuild);
  TORCH_CHECK(begins_with(bytes, kIndexMagic, sizeof(kIndexMagic)), path,
              " is not a Megatron index: it does not begin with MMIDIDX", kRebuild);
  const auto version = load<uint64_t>(bytes.data() + 9);
  TORCH_CHECK(version == kIndexVersion, path, " has index version ", version, ", this reads version ", kIndexVersion,
              kRebuild);
  type_ = static_cast<TokenType>(load<uint8_t>(bytes.data() + 17));
  TORCH_CHECK(token_bytes(type_) > 0, path, " has unknown dtype code ", static_cast<int>(type_), " (1 to 8 exist)",
              kRebuild);
  const auto sequences = load<uint64_t>(bytes.data() + 18);
  const auto documents = load<uint64_t>(bytes.data() + 26);
  // Compares by division first, so that corrupt counts do not overflow.
  const uint64_t room = bytes.size() - kIndexHeaderBytes;
  const bool fits = sequences <= room / 12 && documents <= room / 8;
  const uint64_t expected = kIndexHeaderBytes + (fits ? 12 * sequences + 8 * documents : 0);
  const bool with_modes = bytes.size() == expected + sequences;  // one mode for each sequence; not used here
  TORCH_CHECK(fits && (bytes.size() == expected || with_modes), path, " is truncated or corrupt: it announces ",
              sequences, " sequences and ", documents, " document bounds, which do not make its ", bytes.size(),
              " bytes", kRebuild);
  TORCH_CHECK(sequences > 0, "data set \"", prefix_, "\" holds no sequence at all; tokenise a file ",
              "with some text in it");

  const std::byte* at = bytes.data() + kIndexHeaderBytes;
  lengths_.resize(sequences);
  std::memcpy(lengths_.data(), at, 4 * sequences);
  pointers_ = at + 4 * sequences;
  documents_.resize(documents);
  if (documents > 0)  // else refused by check_sequences
    std::memcpy(documents_.data(), pointers_ + 8 * sequences, 8 * documents);
}

void IndexedDataset::check_sequences() const {
  const std::string path = prefix_ + ".idx";
  const auto sequences = static_cast<int64_t>(lengths_.size());
  TORCH_CHECK(!documents_.empty() && documents_.front() == 0 && documents_.back() == sequences, path,
              " is corrupt: its document bounds do not run from 0 to ", sequences, kRebuild);
  for (size_t i = 1; i < documents_.size(); ++i) {
    TORCH_CHECK(documents_[i - 1] <= documents_[i], path, " is corrupt: document bound ", i,
                " lies before the one in front of it", kRebuild);
  }
  const auto size = bin_.size();
  const int64_t width = token_bytes(type_);
  int64_t tokens = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = pointer(i);
    const int64_t length = lengths_[static_cast<size_t>(i)];
    const bool inside = length >= 0 && begin >= 0 && begin <= size && length * width <= size - begin;
    TORCH_CHECK(inside, "sequence ", i, " of ", path, " (", length, " tokens of ", width, " bytes from byte ", begin,
                ") lies outside ", prefix_, ".bin, which has ", size,
                " bytes: one of the two is truncated, corrupt or from another run", kRebuild);
    tokens += length;
  }
  for (const int64_t other : {1, 2, 4, 8}) {
    TORCH_CHECK(other == width || tokens == 0 || size != tokens * other, path, " says that a token has ", width,
                " bytes, and ", prefix_, ".bin has ", other, " for each: they are of different runs", kRebuild);
  }
}

int64_t IndexedDataset::pointer(int64_t sequence) const { return load<int64_t>(pointers_ + 8 * sequence); }

std::span<const std::byte> IndexedDataset::raw_sequence(int64_t sequence) const {
  const auto size = static_cast<int64_t>(lengths_.size());
  TORCH_CHECK(sequence >= 0 && sequence < size, "data set \"", prefix_, "\" has sequences 0 to ", size - 1, ", got ",
              sequence);
  const auto length = static_cast<size_t>(lengths_[static_cast<size_t>(sequence)] * token_bytes(type_));
  return bytes_of(bin_).subspan(static_cast<size_t>(pointer(sequence)), length);
}

void IndexedDataset::copy_tokens(int64_t sequence, int64_t offset, std::span<int64_t> out) const {
  const auto raw = raw_sequence(sequence);
  const int64_t width = token_bytes(type_);
  const auto length = static_cast<int64_t>(raw.size()) / width;
  TORCH_CHECK(offset >= 0 && offset + static_cast<int64_t>(out.size()) <= length, "sequence ", sequence,
              " of data set \"", prefix_, "\" has ", length, " tokens, got a request for ", out.size(), " from ",
              offset);
  const std::byte* from = raw.data() + offset * width;
  switch (type_) {
    case TokenType::kUInt8:
      return copy_as<uint8_t>(from, out);
    case TokenType::kInt8:
      return copy_as<int8_t>(from, out);
    case TokenType::kInt16:
      return copy_as<int16_t>(from, out);
    case TokenType::kInt32:
      return copy_as<int32_t>(from, out);
    case TokenType::kInt64:
      return copy_as<int64_t>(from, out);
    case TokenType::kUInt16:
      return copy_as<uint16_t>(from, out);
    case TokenType::kFloat32:
    case TokenType::kFloat64:
      break;
  }
  TORCH_CHECK(false, "data set \"", prefix_, "\" stores floating-point values (dtype code ", static_cast<int>(type_),
              "), which are no token ids; tokenise the text again with ", "launch/preprocess/preprocess_data.py");
}

namespace {

namespace fs = std::filesystem;

bool is_file(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool has_tokens(const std::string& prefix) {
  return (is_file(prefix + ".bin") && is_file(prefix + ".idx")) || is_file(prefix + kConversationsSuffix);
}

std::string without(const std::string& path, const std::string& end) {
  return path.ends_with(end) ? path.substr(0, path.size() - end.size()) : "";
}

// The prefix of the folder's first data set by name; empty if there is none.
std::string set_in(const std::string& folder) {
  std::vector<std::string> sets;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    for (const char* end : {".idx", kConversationsSuffix}) {
      const std::string prefix = without(entry.path().string(), end);
      if (!prefix.empty() && has_tokens(prefix)) sets.push_back(prefix);
    }
  }
  return sets.empty() ? "" : *std::min_element(sets.begin(), sets.end());
}

// How to tokenise a file of JSON lines or text; empty for other files.
std::string tokenise(const std::string& path) {
  const bool lines =
      path.ends_with(".jsonl") || path.ends_with(".jsonl.gz") || path.ends_with(".json") || path.ends_with(".json.gz");
  const bool text = path.ends_with(".txt") || path.ends_with(".txt.gz") || path.ends_with(".md");
  if (!lines && !text) return "";
  const std::string stem = path.substr(0, path.find('.', path.rfind('/') + 1));
  return "\"" + path +
         "\" is text, and training reads tokens: run `python launch/preprocess/"
         "preprocess_data.py --input " +
         path + (text ? " --input-format text" : "") + " --output-prefix " + stem +
         " --tokenizer-model MODEL_DIR`, then give the prefix " + stem + "_text_document";
}

// The remedy, guessed from the prefix and from files with similar names.
std::string instead_of(const std::string& prefix) {
  for (const char* end : {".bin", ".idx", kConversationsSuffix}) {
    const std::string shorter = without(prefix, end);
    if (!shorter.empty()) return "give the prefix without " + std::string(end) + ": " + shorter;
  }
  for (const char* end : {"_text_document", "text_document", "_document"})
    if (has_tokens(prefix + end)) return "give the whole prefix, " + prefix + end;
  if (fs::is_directory(prefix)) {
    const std::string set = set_in(prefix);
    return "it is a folder; give the prefix of a .bin and a .idx file in it" +
           (set.empty() ? ", which preprocess_data.py writes" : ", such as " + set);
  }
  if (prefix.find_first_not_of("0123456789.") == prefix.npos)
    return "if it is a weight, a data set must follow it: WEIGHT PREFIX WEIGHT PREFIX ...";
  if (prefix.find(',') != prefix.npos) return "weights and prefixes are divided by spaces, not by commas";
  return "give the common prefix of a .bin and a .idx file, as launch/preprocess/"
         "preprocess_data.py writes them (PREFIX_text_document)";
}

}  // namespace

std::string why_no_tokens(const std::string& prefix) {
  const bool has_bin = is_file(prefix + ".bin");
  const std::string missing = prefix + (has_bin ? ".idx" : ".bin");
  if (has_bin || is_file(prefix + ".idx")) {
    return "data set \"" + prefix + "\": there is no file " + missing + " beside " + prefix +
           (has_bin ? ".bin" : ".idx") + "; copy it too, or write both again with launch/preprocess/preprocess_data.py";
  }
  for (const char* end : {"", ".jsonl", ".json", ".txt", ".jsonl.gz"}) {
    if (is_file(prefix + end)) {
      if (const std::string how = tokenise(prefix + end); !how.empty()) return how;
    }
  }
  return "data set \"" + prefix + "\": there is no file " + prefix + ".idx; " + instead_of(prefix);
}

}  // namespace megashard
