#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/arguments/argument_table.h"
#include "framework/diagnostics.h"

namespace megashard {

/// Arguments or a scheduler's state, by Megatron's names.
using ArgumentRecord = std::vector<std::pair<std::string, ArgumentValue>>;

/// Converts a record to the form in checkpoints.
Dict to_dict(const ArgumentRecord& record);
/// Inverse of to_dict. Values that an ArgumentValue cannot hold (dtypes, Python objects) become None.
ArgumentRecord to_record(const Dict& dict);
/// The value; null if absent or None.
const ArgumentValue* find_known(const ArgumentRecord& record, const std::string& name);

/// Throws UsageErrors, each with both values and the remedy, if the checkpoint's args describe another network
/// (Megatron's check_checkpoint_args). Values that one side lacks are not compared.
void check_checkpoint_arguments(const Arguments& arguments, const ArgumentRecord& saved, const std::string& folder);

/// Other settings that affect training and differ from the checkpoint's args: "global_batch_size 8 -> 16, seed 1 -> 2";
/// empty if none. `takes_schedule`: settings in the checkpoint's scheduler are not compared.
std::string changed_arguments(const Arguments& arguments, const ArgumentRecord& saved, bool takes_schedule);

/// --use-checkpoint-args: takes network, dropout, sequence length and tokenizer from the step that --load would use,
/// unless flags are given (Megatron's load_args_from_checkpoint). Call it before validate_arguments. Every process runs
/// it independently and checks only the sizes of the step's files and the checksum of its args. Without a checkpoint
/// the flags are used.
void take_checkpoint_arguments(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
