#include "tests/framework/data/indexed_dataset_writer.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <limits>

namespace megashard {
namespace {

template <typename T>
void encode(std::span<const int64_t> tokens, std::vector<char>& out) {
  out.resize(tokens.size() * sizeof(T));
  for (size_t i = 0; i < tokens.size(); ++i) {
    const T value = static_cast<T>(tokens[i]);
    TORCH_CHECK(static_cast<int64_t>(value) == tokens[i], "token ", tokens[i], " does not fit ", sizeof(T),
                "-byte tokens; choose a wider TokenType");
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
}

template <typename T>
void put(std::ofstream& file, const T* values, size_t count) {
  file.write(reinterpret_cast<const char*>(values), static_cast<std::streamsize>(count * sizeof(T)));
}

}  // namespace

IndexedDatasetWriter::IndexedDatasetWriter(const std::string& prefix, TokenType type)
    : prefix_(prefix), type_(type), bin_(prefix + ".bin", std::ios::binary | std::ios::trunc) {
  TORCH_CHECK(token_bytes(type) > 0, "unknown token type code ", static_cast<int>(type));
  TORCH_CHECK(bin_.is_open(), "cannot write ", prefix, ".bin; check that its folder exists and is writable");
}

void IndexedDatasetWriter::add_sequence(std::span<const int64_t> tokens) {
  TORCH_CHECK(tokens.size() <= std::numeric_limits<int32_t>::max(), "a sequence holds at most 2^31 - ",
              "1 tokens, got ", tokens.size(), "; split the document");
  switch (type_) {
    case TokenType::kUInt8:
      encode<uint8_t>(tokens, buffer_);
      break;
    case TokenType::kInt8:
      encode<int8_t>(tokens, buffer_);
      break;
    case TokenType::kInt16:
      encode<int16_t>(tokens, buffer_);
      break;
    case TokenType::kInt32:
      encode<int32_t>(tokens, buffer_);
      break;
    case TokenType::kInt64:
      encode<int64_t>(tokens, buffer_);
      break;
    case TokenType::kFloat64:
      encode<double>(tokens, buffer_);
      break;
    case TokenType::kFloat32:
      encode<float>(tokens, buffer_);
      break;
    case TokenType::kUInt16:
      encode<uint16_t>(tokens, buffer_);
      break;
  }
  put(bin_, buffer_.data(), buffer_.size());
  lengths_.push_back(static_cast<int32_t>(tokens.size()));
}

void IndexedDatasetWriter::end_document() { documents_.push_back(static_cast<int64_t>(lengths_.size())); }

void IndexedDatasetWriter::add_document(std::span<const int64_t> tokens) {
  add_sequence(tokens);
  end_document();
}

void IndexedDatasetWriter::finish() {
  if (documents_.back() != static_cast<int64_t>(lengths_.size())) {
    end_document();
  }
  bin_.close();
  TORCH_CHECK(!bin_.fail(), "could not write all of ", prefix_, ".bin; is the disk full?");

  std::vector<int64_t> pointers(lengths_.size());
  int64_t at = 0;
  for (size_t i = 0; i < lengths_.size(); ++i) {
    pointers[i] = at;
    at += lengths_[i] * token_bytes(type_);
  }
  const uint64_t counts[2] = {lengths_.size(), documents_.size()};
  std::ofstream index(prefix_ + ".idx", std::ios::binary | std::ios::trunc);
  put(index, kIndexMagic, sizeof(kIndexMagic));
  put(index, &kIndexVersion, 1);
  put(index, &type_, 1);
  put(index, counts, 2);
  put(index, lengths_.data(), lengths_.size());
  put(index, pointers.data(), pointers.size());
  put(index, documents_.data(), documents_.size());
  index.close();
  TORCH_CHECK(!index.fail(), "could not write all of ", prefix_, ".idx; is the disk full?");
}

}  // namespace megashard
