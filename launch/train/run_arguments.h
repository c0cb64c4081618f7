#pragma once

#include <cstdint>
#include <functional>

#include "framework/data/build_datasets.h"
#include "launch/arguments/command_line.h"

namespace megashard {

/// Data options without the tokenizer's end of document, which would require reading its files.
DataOptions data_options(const Arguments& arguments, int64_t vocab_size, int64_t eod_id,
                         const DiagnosticSink& sink = {});

/// Opens the data and returns the number of samples per epoch.
int64_t samples_of_epoch(const Arguments& arguments);

/// Applies settings of ROLL's worker or MindSpeed-MM's files that depend on the number of ranks and on the data. Calls
/// `epoch_samples` if epochs are used. Call it before validate_for_machine.
void apply_files(CommandLine& line, int64_t world_size, const std::function<int64_t()>& epoch_samples,
                 const DiagnosticSink& sink);

}  // namespace megashard
