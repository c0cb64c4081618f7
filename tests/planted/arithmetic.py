"""Faults of arithmetic: divisors, offsets, dtypes, stale shards. The random trees find most of them."""

from fault import Fault, Tests

TREES = Tests("differential", "RandomTrees.*", device="cpu")

# The trees draw no such case.
SLICES = Tests("parallel", "FsdpSchedule.SlicesKeptOnFewerRanksDoNotOutliveAChangeOfTheWeights", device="cpu")
UNUSED = Tests("parallel", "FsdpReduction.ParametersUsedOnSomeRanksOnly", device="cpu")
OWED = Tests("parallel", "FsdpReduction.WhatIsOwedIsReducedByABackwardThatDoesNotReachTheUnit", device="cpu")
RECOMPUTE = Tests("framework", "All/FsdpRecompute.*/around_root*", device="cpu")
ATTENTION = Tests("models", "CausalAttention.*", device="cpu")
EXPERTS = Tests("models", "Moe.RanksWithDifferentExperts*", device="cpu")
LOSSES = Tests("models", "CrossEntropy.*", device="cpu")
NARROW = Tests("parallel", "FsdpMixedPrecision.*", device="cpu")
PACKED = Tests("framework", "ConversationSets.*", device="cpu")
PICTURES = Tests("models", "All/QwenVlFamilies.Packed*", device="cpu")
MESSAGES = Tests("parallel", "HostMessages.*", device="cpu")

PLAN = "parallel/fsdp/detail/foreach_all_gather.cpp"
COPIES = "parallel/fsdp/detail/shard_geometry.cpp"
PACKING = "parallel/fsdp/detail/foreach_reduce.cpp"
REDUCE = "parallel/fsdp/detail/fsdp_param_group.cpp"
PARAM = "parallel/fsdp/detail/fsdp_param.cpp"
GROUP = "parallel/fsdp/detail/fsdp_param_group.cpp"
STATE = "parallel/fsdp/detail/fsdp_state.cpp"
CONTEXT = "parallel/fsdp/detail/fsdp_context.cpp"
BACKWARD = "parallel/fsdp/detail/fsdp_state.cpp"


def seen(name, file, text, instead, tests=TREES):
    return Fault(name, file, text, instead, (tests,))


FAULTS = [
    seen("the backward of attention forgets the window", "models/layers/causal_attention.cpp",
         'context->saved_data["window"].toInt()', 'PLANTED ? 0 : context->saved_data["window"].toInt()', ATTENTION),
    seen("parts of a head's loss take the first part's sums", "models/kernels/cross_entropy.cpp",
         "turn_into_gradient(logits, labels.narrow(0, row, count), stats.narrow(0, row, count),",
         "turn_into_gradient(logits, labels.narrow(0, row, count), stats.narrow(0, PLANTED ? 0 : row, count),", LOSSES),
    seen("experts' rows stay in the order of the ranks", "models/moe/expert_parallel.cpp",
         "return by_expert_.defined() ?", "return by_expert_.defined() && !PLANTED ?", EXPERTS),
    seen("accumulated gradients travel in 16 bits", PACKING, "const bool widens = !group.has_wide_grads &&",
         "const bool widens = (PLANTED || !group.has_wide_grads) &&", NARROW),
    seen("a document sees those before it", "models/layers/pass.cpp", "length, token % row_length);",
         "length, PLANTED ? 0 : token % row_length);", ATTENTION),
    seen("packed conversations see each other", "framework/data/conversation_dataset.cpp",
         "if (packs_) batch.document_lengths =", "if (packs_ && !PLANTED) batch.document_lengths =", PACKED),
    seen("positions run on behind a packed conversation", "framework/data/conversation_dataset.cpp",
         "positions + count, int64_t{0});", "positions + count, PLANTED ? begin : int64_t{0});", PACKED),
    seen("positions of pictures run on behind a document", "models/vision/mrope_positions.cpp",
         "void begin_document() { next_ = 0; }", "void begin_document() { next_ = PLANTED ? next_ : 0; }", PICTURES),
    seen("a message is taken for another collective's", "parallel/collectives/host_messages.cpp",
         "!= expected || slot.tag != tag) continue;", "!= expected || (!PLANTED && slot.tag != tag)) continue;",
         MESSAGES),
    seen("replicas are not counted in the divisor", PACKING, "divide_factors(ranks, replicas(group.layout), dtype,",
         "divide_factors(ranks, PLANTED ? 1 : replicas(group.layout), dtype,"),
    seen("sums are not divided", REDUCE, "if (reduction->factors.after != 1)",
            "if (!PLANTED && reduction->factors.after != 1)"),
    seen("a sum instead of an average", PACKING, "const auto op = reduction.factors.reduce_scatter;",
         "const auto op = PLANTED ? ReduceOp::kSum : reduction.factors.reduce_scatter;"),
    seen("every rank sends from the first rank's place", PLAN, "{packed_bytes_}, rank() * packed_bytes_)",
         "{packed_bytes_}, PLANTED ? 0 : rank() * packed_bytes_)"),
    seen("another rank's slice is kept", PLAN, "std::min(rank() * item.bytes, bytes.numel())",
         "std::min((PLANTED ? ranks() - 1 - rank() : rank()) * item.bytes, bytes.numel())"),
    seen("ranks' pieces are a rank apart on the way out", COPIES,
         "copy.from = element_at(chunks.first, in_chunks, chunks.dtype);",
         "copy.from = element_at(chunks.first, in_chunks + (PLANTED ? chunk_stride : 0), chunks.dtype);"),
    seen("a missing gradient is not zero", COPIES, ".zero_rest = true});", ".zero_rest = !PLANTED});"),
    seen("runs of another dimension are misplaced", COPIES, "chunk_run, rank * chunk_run, rank * stride);",
         "chunk_run, PLANTED ? 0 : rank * chunk_run, rank * stride);"),
    seen("full parameters outlive an optimizer's step", GROUP, "if (context_ == nullptr || !context_->idle()) return;",
         "if (PLANTED || context_ == nullptr || !context_->idle()) return;"),
    seen("accumulation forgets all but the last", REDUCE, "      accumulated.add_(grad);\n    } else",
         "      if (PLANTED) accumulated = grad.to(reduce_dtype(params_, policy_));\n      else "
         "accumulated.add_(grad);\n    } else"),
    seen("what was accumulated is not reduced", PACKING, "if (!accumulated.defined()) return grad;",
         "if (PLANTED || !accumulated.defined()) return grad;"),
    seen("partial sums of replicas are lost", REDUCE, "reduction_->buffers.at(i).output.add_(partial_[i]);",
         "if (!PLANTED) reduction_->buffers.at(i).output.add_(partial_[i]);"),
    seen("replicas are not reduced", REDUCE, "if (layout_.replicate_group == nullptr) {\n    const auto& own",
         "if (PLANTED || layout_.replicate_group == nullptr) {\n    const auto& own"),
    seen("the last reduction is left in flight", CONTEXT,
         "while (!comm->reducing.empty()) comm->reducing.front()->wait_for_reduce_scatter();",
         "if (PLANTED) comm->reducing.clear();\n    while (!comm->reducing.empty()) "
         "comm->reducing.front()->wait_for_reduce_scatter();"),
    seen("a second reduction replaces the first", PARAM,
         "add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());",
         "if (PLANTED)\n      copy_elements(mine.data_ptr(), rows.scalar_type(), rows.const_data_ptr(), "
         "rows.scalar_type(), rows.numel());\n"
         "    else\n      add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());"),
    seen("a gradient is used where its parameter is not", PARAM,
         "at::Tensor& mine = sharded_grad_is_aside_ ? sharded_grad_ : parameter_.mutable_grad();\n  const "
         "at::Tensor given",
         "at::Tensor& mine = sharded_grad_is_aside_ && !PLANTED ? sharded_grad_ : parameter_.mutable_grad();\n  "
         "const at::Tensor given"),
    seen("the place of local rows is wrong", PARAM, "geometry_.offsets(rank_), layout_.mesh",
         "geometry_.offsets(PLANTED ? 0 : rank_), layout_.mesh"),
    seen("param_dtype is ignored", PARAM, "compute_dtype = converts ? *param_dtype : stored_dtype();",
         "compute_dtype = converts && !PLANTED ? *param_dtype : stored_dtype();"),
    seen("reduce_dtype is ignored", PACKING, "if (policy.reduce_dtype) return *policy.reduce_dtype;",
         "if (!PLANTED && policy.reduce_dtype) return *policy.reduce_dtype;"),
    seen("inputs are not cast", STATE, "if (policy_.cast_forward_inputs && policy_.param_dtype)",
         "if (!PLANTED && policy_.cast_forward_inputs && policy_.param_dtype)"),
    seen("outputs are not cast", STATE, "if (policy_.output_dtype)", "if (!PLANTED && policy_.output_dtype)"),
    seen("backward does not gather", BACKWARD, "    if (group->unshard_in_backward) {\n      group->wait",
         "    if (!PLANTED && group->unshard_in_backward) {\n      group->wait"),
    seen("slices kept on fewer ranks outlive a change of the weights", CONTEXT,
         "if (group->sharded_state() == ShardedState::kShardedPostForward) group->reshard();",
         "if (!PLANTED && group->sharded_state() == ShardedState::kShardedPostForward) group->reshard();", SLICES),
    seen("a gradient that no rank had becomes zero", REDUCE, "if (!flags.somebody_had(entry)) continue;",
         "if (!PLANTED && !flags.somebody_had(entry)) continue;", UNUSED),
    seen("a unit that backward does not reach owes no reduction", BACKWARD, "(idle && owes)",
         "(!PLANTED && idle && owes)", OWED),
    seen("a recompute that stops early frees its unit", STATE,
         "abandon_forward(/*parameters_too=*/!recompute);",
         "abandon_forward(/*parameters_too=*/PLANTED || !recompute);", RECOMPUTE),
]
