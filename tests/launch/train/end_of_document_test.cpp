#include "launch/train/end_of_document.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

/// A folder with the files of a Hugging Face model (end-of-document token 7) and of a GPT-2 tokenizer (token 3).
class EndOfDocument : public ::testing::Test {
 protected:
  EndOfDocument() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::ofstream(folder_ / "config.json") << R"({"eos_token_id": 7})";
    std::ofstream(folder_ / "vocab.json") << R"({"a": 0, "<|endoftext|>": 3})";
    arguments.vocab_file = (folder_ / "vocab.json").string();
  }

  std::string folder() const { return folder_.string(); }
  Arguments arguments;

 private:
  const fs::path folder_ = fs::path(::testing::TempDir()) / "end_of_document";
};

TEST_F(EndOfDocument, OfTheOnlyTokenizer) { EXPECT_EQ(end_of_document_id(arguments), 3); }

TEST_F(EndOfDocument, AVocabFileBesideAnotherTokenizerDoesNotCount) {
  arguments.hf_model = folder();
  EXPECT_EQ(end_of_document_id(arguments), 7);
}

TEST_F(EndOfDocument, TheTokenizerTypeDecides) {
  arguments.hf_model = folder();
  arguments.tokenizer_type = TokenizerType::kGpt2Bpe;
  EXPECT_EQ(end_of_document_id(arguments), 3);
  arguments.tokenizer_type = TokenizerType::kHuggingFace;
  EXPECT_EQ(end_of_document_id(arguments), 7);
  arguments.tokenizer_type = TokenizerType::kNull;
  arguments.vocab_size = 50;
  EXPECT_EQ(end_of_document_id(arguments), 50);
}

TEST_F(EndOfDocument, AVocabFileThatIsNotThereIsTold) {
  arguments.vocab_file = folder() + "/none.json";
  EXPECT_THAT([&] { end_of_document_id(arguments); },
              ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("--vocab-file")));
}

}  // namespace
}  // namespace megashard
