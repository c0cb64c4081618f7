#pragma once

#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "framework/data/sample_dataset.h"

namespace megashard {

class TokenSource;

/// A data set of any format. A split takes a range of it.
struct DataSource {
  std::string name;
  size_t count;  ///< number of documents, conversations or samples
  std::function<std::shared_ptr<const SampleDataset>(const SplitOptions&)> dataset;
};

/// The data set of sequences of tokens.
DataSource source_of(std::shared_ptr<const TokenSource> tokens);

/// A format of data sets besides the program's own, which the file PREFIX + extension identifies.
struct DataFormat {
  std::string extension;
  std::function<DataSource(const std::string& prefix)> open;
};

/// All that are registered.
const std::vector<DataFormat>& data_formats();

/// Versions that a format is compiled against. The program ignores a format whose stamp differs from its own.
struct DataFormatStamp {
  uint32_t version = 1;  ///< changes with DataFormat, DataSource and SampleDataset
  const char* libtorch = TORCH_VERSION;
  size_t batch_bytes = sizeof(Batch);
  size_t batch_options_bytes = sizeof(BatchOptions);
  size_t split_options_bytes = sizeof(SplitOptions);
  size_t facts_bytes = sizeof(DatasetFacts);
};

/// A static object of a format's file, which is part of the program or a library of --loss-plugin, --callback-plugin or
/// --model-plugin. Leave the default stamp.
struct RegisterDataFormat {
  explicit RegisterDataFormat(const DataFormat& format, const DataFormatStamp& stamp = {});
};

/// Number of formats that were ignored.
int64_t ignored_data_formats();

}  // namespace megashard
