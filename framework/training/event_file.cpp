#include "framework/training/event_file.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

constexpr std::array<uint32_t, 256> kRemainders = [] {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, its bits reversed
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1U) * kPolynomial);
    table[byte] = remainder;
  }
  return table;
}();

/// TFRecord's: so that a checksum of data that hold checksums is none of zeros.
uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8U; }

template <class Number>
std::string little_endian(Number number) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

// Protobuf's wire format: each field a key (its number and how it is stored), then the value.
enum WireType : uint64_t { kVarint = 0, kEightBytes = 1, kLengthFirst = 2, kFourBytes = 5 };

std::string varint(uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  return bytes += static_cast<char>(number);
}

std::string field_key(uint64_t field, WireType type) { return varint(field << 3 | type); }
std::string whole_field(uint64_t field, uint64_t value) { return field_key(field, kVarint) + varint(value); }
std::string double_field(uint64_t field, double value) { return field_key(field, kEightBytes) + little_endian(value); }
std::string float_field(uint64_t field, float value) { return field_key(field, kFourBytes) + little_endian(value); }
std::string bytes_field(uint64_t field, const std::string& bytes) {
  return field_key(field, kLengthFirst) + varint(bytes.size()) + bytes;
}

// The numbers of the fields in tensorflow/core/util/event.proto and framework/summary.proto.
namespace event {
constexpr uint64_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
}
namespace summary {
constexpr uint64_t kValue = 1, kTag = 1, kSimpleValue = 2;
}
namespace session_log {
constexpr uint64_t kStatus = 1, kStart = 1;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string new_path(const std::string& folder) {
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  return folder + "/events.out.tfevents." + std::to_string(static_cast<int64_t>(seconds_now())) + "." + host + "." +
         std::to_string(getpid());
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t remainder = ~0U;
  for (const char byte : bytes)
    remainder = (remainder >> 8) ^ kRemainders[(remainder ^ static_cast<uint8_t>(byte)) & 0xffU];
  return ~remainder;
}

EventFile::EventFile(const std::string& folder) : path_(new_path(folder)) {
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  std::filesystem::create_directories(folder, ignored);
  if (!file_.open(path_, /*anew=*/true))
    throw UsageError("--tensorboard-dir " + folder + " cannot be written; check the folder and its permissions.");
  add(bytes_field(event::kFileVersion, "brain.Event:2"), 0);
}

void EventFile::add(const std::string& event_fields, int64_t step) {
  std::string record = double_field(event::kWallTime, seconds_now());
  if (step != 0) record += whole_field(event::kStep, static_cast<uint64_t>(step));
  record += event_fields;
  const std::string length = little_endian(static_cast<uint64_t>(record.size()));
  unwritten_ += length + little_endian(masked_crc32c(length)) + record + little_endian(masked_crc32c(record));
}

void EventFile::add_scalar(const std::string& tag, double value, int64_t step) {
  const std::string point =
      bytes_field(summary::kTag, tag) + float_field(summary::kSimpleValue, static_cast<float>(value));
  add(bytes_field(event::kSummary, bytes_field(summary::kValue, point)), step);
}

void EventFile::start_at(int64_t step) {
  add(bytes_field(event::kSessionLog, whole_field(session_log::kStatus, session_log::kStart)), step);
}

void EventFile::flush() {
  if (!file_.append(std::exchange(unwritten_, "")))
    throw std::runtime_error("event file " + path_ + " could not be written: " + std::strerror(errno));
}

}  // namespace megashard
