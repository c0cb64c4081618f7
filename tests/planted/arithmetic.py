"""Faults of what is computed: divisors, offsets, dtypes, stale shards. The random trees notice most of them."""

from fault import Fault, Tests

TREES = Tests("differential", "RandomTrees.*", device="cpu")

# The trees draw no such case.
SLICES = Tests("parallel", "FsdpSchedule.SlicesKeptOnFewerRanksDoNotOutliveAChangeOfTheWeights", device="cpu")
UNUSED = Tests("parallel", "FsdpReduction.ParametersUsedOnSomeRanksOnly", device="cpu")
OWED = Tests("parallel", "FsdpReduction.WhatIsOwedIsReducedByABackwardThatDoesNotReachTheUnit", device="cpu")
RECOMPUTE = Tests("framework", "All/FsdpRecompute.*/around_root*", device="cpu")

PLAN = "parallel/fsdp/gather_plan.cpp"
COPIES = "parallel/fsdp/shard_copies.cpp"
PACKING = "parallel/fsdp/gradient_packing.cpp"
REDUCE = "parallel/fsdp/fsdp_reduce.cpp"
PARAM = "parallel/fsdp/fsdp_param.cpp"
GROUP = "parallel/fsdp/fsdp_group.cpp"
STATE = "parallel/fsdp/fsdp_state.cpp"
BACKWARD = "parallel/fsdp/fsdp_state_backward.cpp"


def seen(name, file, text, instead, tests=TREES):
    return Fault(name, file, text, instead, (tests,))


FAULTS = [
    seen("replicas are not counted in the divisor", PACKING, "gradient_scaling(layout_.shard_group->size(), replicas(),",
         "gradient_scaling(layout_.shard_group->size(), PLANTED ? 1 : replicas(),"),
    seen("sums are not divided", REDUCE, "if (reduction->scaling.after != 1)", "if (!PLANTED && reduction->scaling.after != 1)"),
    seen("a sum instead of an average", REDUCE, "const auto op = reduction.scaling.scatter;",
         "const auto op = PLANTED ? ReduceOp::kSum : reduction.scaling.scatter;"),
    seen("every rank sends from the first rank's place", PLAN, "{packed_bytes_}, rank() * packed_bytes_)",
         "{packed_bytes_}, PLANTED ? 0 : rank() * packed_bytes_)"),
    seen("another rank's slice is kept", PLAN, "std::min(rank() * piece.bytes, full.numel())",
         "std::min((PLANTED ? ranks() - 1 - rank() : rank()) * piece.bytes, full.numel())"),
    seen("ranks' pieces are a rank apart on the way out", COPIES,
         "copy.from = element_at(chunks.first, in_chunks, chunks.dtype);",
         "copy.from = element_at(chunks.first, in_chunks + (PLANTED ? chunk_stride : 0), chunks.dtype);"),
    seen("a missing gradient is not zero", COPIES, ".zero_rest = true});", ".zero_rest = !PLANTED});"),
    seen("runs of another dimension are misplaced", COPIES, "chunk_run, rank * chunk_run, rank * stride);",
         "chunk_run, PLANTED ? 0 : rank * chunk_run, rank * stride);"),
    seen("full parameters outlive an optimizer's step", GROUP, "if (context_ == nullptr || !context_->idle()) return;",
         "if (PLANTED || context_ == nullptr || !context_->idle()) return;"),
    seen("accumulation forgets all but the last", REDUCE, "      accumulated.add_(gradient);\n    } else",
         "      if (PLANTED) accumulated = gradient.to(reduce_dtype());\n      else accumulated.add_(gradient);\n    } else"),
    seen("what was accumulated is not reduced", PACKING, "if (!accumulated.defined()) return gradient;",
         "if (PLANTED || !accumulated.defined()) return gradient;"),
    seen("partial sums of replicas are lost", REDUCE, "reduction_->buffers.at(i).output.add_(partial_[i]);",
         "if (!PLANTED) reduction_->buffers.at(i).output.add_(partial_[i]);"),
    seen("replicas are not reduced", REDUCE, "if (layout_.replicate_group == nullptr) {\n    const auto& own",
         "if (PLANTED || layout_.replicate_group == nullptr) {\n    const auto& own"),
    seen("the last reduction is left in flight", BACKWARD,
         "while (!comm.reducing.empty()) comm.reducing.front()->finish_reduce();",
         "if (PLANTED) comm.reducing.clear();\n    while (!comm.reducing.empty()) comm.reducing.front()->finish_reduce();"),
    seen("a second reduction replaces the first", PARAM,
         "add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());",
         "if (PLANTED)\n      copy_elements(mine.data_ptr(), rows.scalar_type(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());\n"
         "    else\n      add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());"),
    seen("a gradient is used where its parameter is not", PARAM,
         "at::Tensor& mine = stashed_ ? stashed_gradient_ : parameter_.mutable_grad();\n  const at::Tensor rows",
         "at::Tensor& mine = stashed_ && !PLANTED ? stashed_gradient_ : parameter_.mutable_grad();\n  const at::Tensor rows"),
    seen("the place of local rows is wrong", PARAM, "geometry_.offsets(rank_), layout_.mesh",
         "geometry_.offsets(PLANTED ? 0 : rank_), layout_.mesh"),
    seen("param_dtype is ignored", PARAM, "compute_dtype_ = converts ? *param_dtype : stored_dtype();",
         "compute_dtype_ = converts && !PLANTED ? *param_dtype : stored_dtype();"),
    seen("reduce_dtype is ignored", PACKING, "if (policy_.reduce_dtype) return *policy_.reduce_dtype;",
         "if (!PLANTED && policy_.reduce_dtype) return *policy_.reduce_dtype;"),
    seen("inputs are not cast", STATE, "if (policy_.cast_forward_inputs && policy_.param_dtype)",
         "if (!PLANTED && policy_.cast_forward_inputs && policy_.param_dtype)"),
    seen("outputs are not cast", STATE, "if (policy_.output_dtype)", "if (!PLANTED && policy_.output_dtype)"),
    seen("backward does not gather", BACKWARD, "    if (group->unshard_in_backward) {\n      group->wait",
         "    if (!PLANTED && group->unshard_in_backward) {\n      group->wait"),
    seen("slices kept on fewer ranks outlive a change of the weights", STATE,
         "if (group->state() == FsdpGroup::State::kPostForward) group->release();",
         "if (!PLANTED && group->state() == FsdpGroup::State::kPostForward) group->release();", SLICES),
    seen("a gradient that no rank had becomes zero", REDUCE, "if (!flags.somebody_had(entry)) continue;",
         "if (!PLANTED && !flags.somebody_had(entry)) continue;", UNUSED),
    seen("a unit that backward does not reach owes no reduction", BACKWARD, "state->phase_ == Phase::kIdle && owes",
         "!PLANTED && state->phase_ == Phase::kIdle && owes", OWED),
    seen("a recompute that stops early frees its unit", STATE,
         "give_up_forward(/*parameters_too=*/false);  // a recompute may stop early: backward needs them",
         "give_up_forward(/*parameters_too=*/PLANTED);", RECOMPUTE),
]
