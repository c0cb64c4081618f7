#include "launch/infer/inference_run.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <iostream>
#include <optional>

#include "framework/training/generation.h"
#include "framework/training/loaded_weights.h"
#include "framework/training/parallel_groups.h"
#include "framework/training/progress.h"
#include "framework/training/training_checkpoint.h"
#include "launch/output/status_line.h"
#include "launch/train/device_report.h"

namespace megashard {
namespace {

constexpr RunParts kInference = {.training = false, .schedule = false};

void load_step(const Arguments& arguments, const Session& session) {
  if (session.from.source != WeightSource::kCheckpoint) return;
  TrainingState state{.arguments = arguments,
                      .model = session.model(),
                      .optimizer = nullptr,
                      .schedule = nullptr,
                      .device = session.device};
  load_training_checkpoint(state, session.from.step, session.groups.world, /*weights_only=*/true);
}

/// What a model makes of weights that are no numbers looks like any other tokens.
void check_weights(const MultiModalModule& model, const Arguments& arguments, const Start& from,
                   const ProcessGroupPtr& group) {
  if (from.source == WeightSource::kInitialisation) return;
  const std::string found = list_nonfinite_weights(model, group);
  const std::string step = from.source == WeightSource::kCheckpoint ? from.step.folder : *arguments.hf_model;
  const std::string base = arguments.lora_r ? " and " + *arguments.hf_model : "";
  TORCH_CHECK(found.empty(), "of the weights loaded from ", step, base, ", ", found,
              "; take other files, or convert these again");
}

}  // namespace

bool is_shown_without_training(const Option& option) { return !option.pretrain_only; }

int run_inference(int argc, char** argv, const Program& program, const std::function<void(CommandLine&)>& read_flags,
                  const std::function<void(const InferenceRun&)>& run) {
  CommandLine line;
  try {
    line = parse_arguments(argc, argv, program);
  } catch (const HelpRequested& help) {
    std::cout << help.what();
    return 0;
  }
  const RendezvousOptions environment = ranks_of_launcher(line.arguments);
  const DiagnosticSink sink = sink_for(environment.rank);
  for (const auto& notice : line.notices) sink(Severity::kNotice, notice);
  read_flags(line);
  if (const auto& split = line.arguments.split) {
    sink(Severity::kWarning,
         "--split " + *split + " is not used: " + program.name + " reads every document of --data-path.");
  }
  const RunPlan plan = plan_run(std::move(line), kInference, environment, sink);
  const Arguments& arguments = plan.arguments;

  std::optional<ProgressLine> progress;
  if (environment.rank == 0) progress.emplace([&sink](const std::string& text) { sink(Severity::kNotice, text); });
  const ProcessGroupPtr group = join_world(plan, environment);
  const Session session = open_session(plan, group, sink);
  load_step(arguments, session);
  check_weights(session.model(), arguments, session.from, group);
  session.model().eval();
  const ProcessGroupPtr& sharding = session.groups.sharding;
  run({.arguments = arguments,
       .session = session,
       .ranks = {.device = session.device,
                 .sequence = sequence_ranks(arguments, session.model(), sharding),
                 .all = group},
       .readers = data_parallel_group(arguments, sharding),
       .sink = sink});
  group->barrier();
  log_findings(session.device, sink);
  return 0;
}

void tell_if_recomputed(const InferenceRun& run) {
  const std::string why = why_recomputed(run.model(), run.ranks);
  if (!why.empty()) run.sink(Severity::kNotice, "each new token takes a forward of the whole text: " + why);
}

at::Tensor gather_rows(const at::Tensor& mine, int64_t rows, const ProcessGroupPtr& group, c10::Device device) {
  auto sizes = mine.sizes().vec();
  sizes[0] = group->size() * rows;
  at::Tensor all = at::zeros(sizes, mine.options().device(device));
  const at::Tensor own = all.narrow(0, group->rank() * rows, rows);
  own.narrow(0, 0, mine.size(0)).copy_(mine);
  if (group->size() > 1) group->all_gather_into(all, own).wait();
  return all.cpu();
}

}  // namespace megashard
