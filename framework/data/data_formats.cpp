#include "framework/data/data_formats.h"

#include <string_view>

#include "framework/data/gpt_dataset.h"

namespace megashard {
namespace {

/// Made at the first call, which may come before other static objects exist.
std::vector<DataFormat>& registered_formats() {
  static std::vector<DataFormat> formats;
  return formats;
}

int64_t ignored_formats = 0;

bool is_own(const DataFormatStamp& stamp) {
  const DataFormatStamp own;
  return stamp.version == own.version && std::string_view(stamp.libtorch) == own.libtorch &&
         stamp.batch_bytes == own.batch_bytes && stamp.batch_options_bytes == own.batch_options_bytes &&
         stamp.split_options_bytes == own.split_options_bytes && stamp.facts_bytes == own.facts_bytes;
}

}  // namespace

DataSource source_of(std::shared_ptr<const TokenSource> tokens) {
  return {tokens->name(), tokens->sequence_lengths().size(),
          [tokens](const SplitOptions& split) { return std::make_shared<GPTDataset>(tokens, split); }};
}

const std::vector<DataFormat>& data_formats() { return registered_formats(); }

int64_t ignored_data_formats() { return ignored_formats; }

RegisterDataFormat::RegisterDataFormat(const DataFormat& format, const DataFormatStamp& stamp) {
  if (is_own(stamp)) {
    registered_formats().push_back(format);
  } else {
    ++ignored_formats;  // `format` may have another layout
  }
}

}  // namespace megashard
