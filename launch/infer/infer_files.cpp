#include "launch/infer/infer_files.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

InferDocuments::InferDocuments(const std::string& prefix, int64_t seq_length, int64_t vocab_size)
    : prefix_(prefix), seq_length_(seq_length), vocab_size_(vocab_size) {
  if (ConversationSet::exists(prefix)) {
    conversations_ = std::make_unique<ConversationSet>(prefix);
  } else {
    documents_ = std::make_unique<IndexedDataset>(prefix);
  }
}

int64_t InferDocuments::size() const {
  return conversations_ ? conversations_->size() : static_cast<int64_t>(documents_->document_indices().size()) - 1;
}

int64_t InferDocuments::tokens() const {
  int64_t tokens = 0;
  if (conversations_) {
    for (int64_t i = 0; i < conversations_->size(); ++i) tokens += conversations_->tokens_of(i);
  } else {
    for (const int32_t each : documents_->sequence_lengths()) tokens += each;
  }
  return tokens;
}

int64_t InferDocuments::tokens_of(int64_t number) const {
  return conversations_ ? conversations_->tokens_of(number) : static_cast<int64_t>(text_of(number).size());
}

std::vector<int64_t> InferDocuments::text_of(int64_t number) const {
  if (conversations_) {
    const auto tokens = conversations_->sample(number).tokens;
    return {tokens.begin(), tokens.end()};
  }
  const auto bounds = documents_->document_indices();
  std::vector<int64_t> tokens;
  for (int64_t sequence = bounds[number]; sequence < bounds[number + 1]; ++sequence) {
    const auto start = tokens.size();
    tokens.resize(start + static_cast<size_t>(documents_->sequence_lengths()[sequence]));
    documents_->copy_tokens(sequence, 0, std::span(tokens).subspan(start));
  }
  return tokens;
}

void InferDocuments::check(const std::vector<int64_t>& text, int64_t number) const {
  const int64_t most = seq_length_ + 1;
  const auto size = static_cast<int64_t>(text.size());
  const std::string name = c10::str(conversations_ ? "conversation " : "document ", number, " of ", prefix_);
  TORCH_CHECK(size >= 1 && size <= most, name, " has ", size, " tokens; it must have 1 to ", most,
              ", which is --seq-length and one",
              size > most ? c10::str(": give --seq-length ", size - 1) : ": leave it out");
  for (const int64_t token : text) {
    TORCH_CHECK(token >= 0 && token < vocab_size_, name, " has the token ", token, ", but the model's vocabulary has ",
                vocab_size_, "; use the data of its tokenizer");
  }
}

InferenceBatch InferDocuments::read(int64_t first, int64_t last) const {
  InferenceBatch batch;
  std::vector<ConversationSet::Sample> samples;
  for (int64_t i = first; i < last; ++i) {
    batch.texts.push_back(text_of(i));
    check(batch.texts.back(), i);
    if (conversations_) samples.push_back(conversations_->sample(i));
  }
  if (conversations_) add_items(batch.items, *conversations_, samples, /*pin_memory=*/false);
  return batch;
}

InferenceBatch InferDocuments::prompts(InferenceBatch batch, int64_t first, PromptEnd end) const {
  if (!conversations_) return batch;
  for (auto& text : batch.texts) {
    const auto learnt = conversations_->sample(first).loss_mask;
    size_t length = text.size();
    if (end == PromptEnd::kFirstAnswer) {
      length = static_cast<size_t>(std::ranges::find_if(learnt, std::identity()) - learnt.begin());
    } else {
      while (length > 0 && learnt[length - 1] == 0) --length;  // behind the answer
      while (length > 0 && learnt[length - 1] != 0) --length;
    }
    TORCH_CHECK(length > 0, "conversation ", first, " of ", prefix_,
                " is an answer without a question, so there is nothing to go on from");
    text.resize(length);
    ++first;
  }
  return batch;
}

bool InferDocuments::has_pictures() const {
  return conversations_ && std::ranges::any_of(conversations_->items(), &ConversationSet::Items::is_input);
}

void write_column(const std::string& prefix, const std::string& name, const at::Tensor& values) {
  const SafetensorsFile old(prefix + kConversationsSuffix);
  const TensorInfo column{.name = "column." + name, .dtype = at::kFloat, .sizes = values.sizes().vec()};
  std::vector<TensorInfo> tensors{column};
  for (const TensorInfo& each : old.tensors()) {
    if (each.name != column.name) tensors.push_back(each);
  }
  SafetensorsWriter file(old.path(), std::move(tensors), old.metadata());
  for (const TensorInfo& each : file.tensors()) file.write(each.name == column.name ? values : old.tensor(each.name));
  file.finish();
}

namespace {

constexpr size_t kHeaderBytes = 128;  // magic, version, length, description: a multiple of 64

}  // namespace

NpyFile::NpyFile(std::string path, at::ScalarType dtype, int64_t columns)
    : path_(std::move(path)), dtype_(dtype), columns_(columns) {
  TORCH_INTERNAL_ASSERT(dtype == at::kFloat || dtype == at::kLong);
  const auto folder = std::filesystem::path(path_).parent_path();
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  file_.open(path_, std::ios::binary | std::ios::trunc);
  if (!file_) throw UsageError(path_ + " cannot be written; check the path.");
  write_header();
}

void NpyFile::write_header() {
  const std::string type = dtype_ == at::kFloat ? "<f4" : "<i8";
  std::string text = "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + std::to_string(rows_) + ", " +
                     std::to_string(columns_) + "), }";
  constexpr size_t kBefore = 10;  // "\x93NUMPY", version 1.0, u16 length
  text.resize(kHeaderBytes - kBefore - 1, ' ');
  text += '\n';
  const char start[kBefore] = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0, static_cast<char>(text.size()), 0};
  file_.seekp(0);
  file_.write(start, kBefore);
  file_ << text;
}

void NpyFile::append(const at::Tensor& rows) {
  const at::Tensor values = rows.contiguous();
  TORCH_INTERNAL_ASSERT(values.dim() == 2 && values.size(1) == columns_ && values.scalar_type() == dtype_);
  file_.write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  rows_ += values.size(0);
}

void NpyFile::finish() {
  write_header();
  file_.close();
  TORCH_CHECK(file_, path_, " could not be written to its end: is the disk full?");
}

}  // namespace megashard
