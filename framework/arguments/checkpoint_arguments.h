#pragma once

#include <string>

#include "framework/arguments/argument_record.h"
#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"

namespace megashard {

/// Throws UsageError, with both values and the remedy, when the checkpoint's args describe another
/// network (check_checkpoint_args of Megatron). What either side does not know is not compared.
void check_checkpoint_arguments(const Arguments& arguments, const ArgumentRecord& saved, const std::string& folder);

/// "global_batch_size 8 -> 16, seed 1 -> 2": what else steers the training and differs from the
/// checkpoint's args; empty when nothing does.
std::string changed_arguments(const Arguments& arguments, const ArgumentRecord& saved);

/// --use-checkpoint-args: network, dropouts, sequence length and tokenizer of the step that --load
/// would take, where the flags are not given (load_args_from_checkpoint of Megatron). Before
/// validate_arguments; every process for itself, which compares the lengths of the step's files and
/// the checksums of its args alone. Without a checkpoint the flags count.
void take_checkpoint_arguments(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
