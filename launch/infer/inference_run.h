#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "framework/training/inference.h"
#include "launch/arguments/command_line.h"
#include "launch/train/session.h"

namespace megashard {

/// A loaded model and what it is run with.
struct InferenceRun {
  const Arguments& arguments;
  const Session& session;
  InferenceRanks ranks;     ///< of the model
  ProcessGroupPtr readers;  ///< the ranks that read the same rows of other documents
  const DiagnosticSink& sink;

  MultiModalModule& model() const { return session.model(); }
  bool is_first() const { return session.groups.world->rank() == 0; }
};

/// Selects the options that programs without training list.
bool is_shown_without_training(const Option& option);

/// A program that runs a model without training it. `read_flags` reads the program's own flags, and adds what is wrong
/// to the line's mistakes; `run` gets the model with its weights, which are numbers.
int run_inference(int argc, char** argv, const Program& program, const std::function<void(CommandLine&)>& read_flags,
                  const std::function<void(const InferenceRun&)>& run);

/// A notice if generate() computes the whole text for each token, with the reason.
void tell_if_recomputed(const InferenceRun& run);

/// All ranks' rows, in the order of the ranks, on the CPU; each has at most `rows`, the others are filled up with 0.
at::Tensor gather_rows(const at::Tensor& mine, int64_t rows, const ProcessGroupPtr& group, c10::Device device);

}  // namespace megashard
