#include "checkpoint/crc32.h"

#include <array>
#include <cstring>

namespace megashard {
namespace {

constexpr int kSlices = 16;  // bytes a step; one table each
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320U : 0);
    tables[0][byte] = crc;
  }
  for (int slice = 1; slice < kSlices; ++slice) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const auto previous = tables[slice - 1][byte];
      tables[slice][byte] = previous >> 8 ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t fold(uint32_t word, int slice) {
  return kTables[slice][word & 0xff] ^ kTables[slice - 1][word >> 8 & 0xff] ^
         kTables[slice - 2][word >> 16 & 0xff] ^ kTables[slice - 3][word >> 24];
}

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, int64_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= kSlices; bytes -= kSlices, at += kSlices) {
    uint32_t words[4];  // little-endian, as all machines that LibTorch runs on here
    std::memcpy(words, at, sizeof words);
    crc = fold(words[0] ^ crc, 15) ^ fold(words[1], 11) ^ fold(words[2], 7) ^ fold(words[3], 3);
  }
  for (; bytes > 0; --bytes, ++at) crc = crc >> 8 ^ kTables[0][(crc ^ *at) & 0xff];
  return ~crc;
}

}  // namespace megashard
