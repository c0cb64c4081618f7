#pragma once

#include <cstdint>
#include <string>

#include "framework/arguments/arguments.h"
#include "framework/data/sample_dataset.h"

namespace megashard {

/// What a run prints before its first step, as pure functions; in Megatron's words where it has
/// any, since scripts cut them.

/// "using world size: 2, data-parallel size: 2, ..."
std::string sizes_line(const Arguments& arguments);
/// Arguments between dashes, sorted without regard to case: those that differ from the defaults, or
/// with --print-all-arguments all.
std::string arguments_banner(const Arguments& arguments);
/// " > padded vocab (size: 100) with 28 dummy tokens (new size: 128)"
std::string padded_vocab_line(int64_t vocab_size, int64_t padded_size);
/// " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 123"
std::string parameter_count_line(int64_t parameters);
/// " > trainable parameters: 12 (9.76%) of 123"
std::string trainable_parameters_line(int64_t trainable, int64_t parameters);

/// " > training data: 8 documents, 320 tokens; asked for: 64 samples of 16 tokens, 3.20 epochs".
/// `split`: "training". Without a dataset: that it is not read.
std::string data_line(const std::string& split, const SampleDataset* dataset, int64_t samples, int64_t seq_length);

}  // namespace megashard
