#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/arguments/argument_table.h"
#include "framework/diagnostics.h"

namespace megashard {

/// Arguments, or a scheduler's state, by Megatron's names.
using ArgumentRecord = std::vector<std::pair<std::string, ArgumentValue>>;

/// As checkpoints keep them.
Dict to_dict(const ArgumentRecord& record);
/// The inverse. What an ArgumentValue cannot hold (dtypes, Python objects) is None.
ArgumentRecord to_record(const Dict& dict);
/// Null when absent or None.
const ArgumentValue* find_known(const ArgumentRecord& record, const std::string& name);

/// Throws UsageErrors, each with both values and the remedy, when the checkpoint's args describe
/// another network (check_checkpoint_args of Megatron). What either side does not know is not compared.
void check_checkpoint_arguments(const Arguments& arguments, const ArgumentRecord& saved, const std::string& folder);

/// "global_batch_size 8 -> 16, seed 1 -> 2": what else steers the training and differs from the
/// checkpoint's args; empty when nothing does. `takes_schedule`: the checkpoint's scheduler decides what it holds.
std::string changed_arguments(const Arguments& arguments, const ArgumentRecord& saved, bool takes_schedule);

/// --use-checkpoint-args: network, dropouts, sequence length and tokenizer of the step that --load
/// would take, where the flags are not given (load_args_from_checkpoint of Megatron). Before
/// validate_arguments; every process for itself, which compares the lengths of the step's files and
/// the checksums of its args alone. Without a checkpoint the flags count.
void take_checkpoint_arguments(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
