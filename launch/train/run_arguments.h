#pragma once

#include <cstdint>
#include <functional>

#include "framework/data/build_datasets.h"
#include "launch/arguments/command_line.h"

namespace megashard {

/// Without the tokenizer's end of document, which costs a look at its files.
DataOptions data_options(const Arguments& arguments, int64_t vocab_size, int64_t eod_id,
                         const DiagnosticSink& sink = {});

/// Of a pass over the data, which are opened.
int64_t samples_of_epoch(const Arguments& arguments);

/// What ROLL's worker or MindSpeed-MM's files say that depends on the number of ranks, and on the data:
/// `epoch_samples` is called where epochs count. Before validate_for_machine.
void apply_files(CommandLine& line, int64_t world_size, const std::function<int64_t()>& epoch_samples,
                 const DiagnosticSink& sink);

}  // namespace megashard
