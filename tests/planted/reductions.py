"""Faults of reductions: the streams that reduce, their buffers, and waits for gradients."""

from fault import Fault, Tests, without

STREAMS = Tests("parallel", "Each/ReductionStreams.*")
PARITY = Tests("parallel", "Each/ReductionStreams.*/added")
REPLICAS = Tests("parallel", "FullyShardExtensions.test_hsdp_train_parity_multi_group")
ONE_RANK = Tests("parallel", "GpuReduction.*")
PREFETCHES = Tests("parallel", "FsdpSchedule.APrefetchThatNobodyUses*")
HOOK = Tests("parallel", "Cuda/FullyShardInit.test_custom_hook_custom_stream*")
BY_HAND = Tests("parallel", "ReductionStreams.GradientsReducedByHand*")
PENDING = Tests("parallel", "FullyShardPendingGrad.*")
MEMORY = Tests("parallel", "ReductionStreams.NoBuffer*")
CPU = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group", device="cpu")
CPU_REPLICAS = Tests("parallel", "FullyShardExtensions.test_hsdp_train_parity_multi_group", device="cpu")
IN_FLIGHT = Tests("parallel", "FullyShardComm.test_set_reduce_scatter_max_input_buffers:FullyShardMemory.*",
        device="cpu")

REDUCE = "parallel/fsdp/detail/fsdp_param_group.cpp"
BACKWARD = "parallel/fsdp/detail/fsdp_state.cpp"
CONTEXT = "parallel/fsdp/detail/fsdp_context.cpp"
SCATTER = "parallel/fsdp/detail/foreach_reduce.cpp"

FAULTS = [
    without("a reduction does not wait for gradients", SCATTER,
            "if (streams.enabled() && !stays) order_streams(streams.current(), *reduction.stream);", PARITY),
    without("a reduction does not wait for readers of the last buffers", CONTEXT,
            "held_reduction_read_.make_wait(*streams.reduce_scatter);", STREAMS),
    Fault("reduced buffers are not held", REDUCE, "if (!reduction->buffers.empty()) shared.hold",
          "if (!PLANTED && !reduction->buffers.empty()) shared.hold", (STREAMS,)),
    without("reduced buffers are held until an older event", CONTEXT,
            "held_reduction_read_ = StreamEvent::record(streams.current());", STREAMS),
    without("reduced buffers are replaced without a wait", REDUCE, "shared.drop_held_reduction();", STREAMS),
    without("the last reduced buffers outlive backward", CONTEXT, "comm.drop_held_reduction();", MEMORY),
    Fault("a reduction runs on the current stream", SCATTER, "  const StreamScope scope(reduction.stream);",
          "  const StreamScope scope(PLANTED ? std::nullopt : reduction.stream);", (STREAMS,)),
    Fault("one rank's gradients are reduced in place on another stream", SCATTER,
          "      buffer.output.copy_(buffer.input);\n      continue;",
          "      if (PLANTED) {\n        buffer.output = buffer.input;\n      } else {\n        "
          "buffer.output.copy_(buffer.input);\n      }\n"
          "      continue;", (ONE_RANK,)),
    without("the host does not wait for a reduction on a CPU", REDUCE,
            "for (auto& buffer : reduction_->buffers) buffer.work.wait();",
            CPU, before="\n  if (streams"),
    without("gradients are freed while they are reduced", REDUCE,
            "if (streams.enabled()) reduction_->scattered.make_wait(streams.current());", PARITY),
    Fault("gradients are freed as soon as their reduction is enqueued", SCATTER,
          "  if (streams.enabled()) reduction.scattered",
          "  if (PLANTED && shard_group->size() > 1) for (auto& buffer : reduction.buffers) buffer.input = "
          "at::Tensor();\n"
          "  if (streams.enabled()) reduction.scattered", (PARITY,)),
    without("the event of a reduction is not recorded", SCATTER,
            "reduction.scattered = StreamEvent::record(*reduction.stream);", PARITY, after="if (streams.enabled()) "),
    Fault("reduced gradients are assigned on the current stream", REDUCE,
            "  const StreamScope scope(reduction_->stream);",
          "  const StreamScope scope(PLANTED ? std::nullopt : reduction_->stream);", (PENDING,)),
    without("an all-reduce does not wait for its reduce-scatter", REDUCE,
            "order_streams(*streams.reduce_scatter, *streams.all_reduce);", REPLICAS),
    Fault("an all-reduce runs on the stream of reduce-scatters", REDUCE,
          "const StreamScope all_reduce_scope(streams.all_reduce);",
          "const StreamScope all_reduce_scope(PLANTED ? std::nullopt : streams.all_reduce);", (STREAMS,)),
    without("the host does not wait for an all-reduce on a CPU", REDUCE,
            "for (auto& buffer : reduction_->buffers) buffer.work.wait();", CPU_REPLICAS,
                    before="\n  const StreamScope"),
    Fault("all-reduced gradients are assigned on the current stream", REDUCE,
          "const StreamScope scope(context_->streams().all_reduce);",
          "const StreamScope scope(PLANTED ? std::nullopt : context_->streams().all_reduce);", (STREAMS,)),
    without("a hook's stream does not wait for the reduction", REDUCE,
            "order_streams(*context_->streams().reduce_scatter, stream);", HOOK),
    Fault("a hook runs on another stream than its own", REDUCE, "const StreamScope scope(stream);",
          "const StreamScope scope(PLANTED ? std::nullopt : std::optional(stream));", (HOOK,)),
    without("the end of backward does not know of a hook's stream", REDUCE, "context_->comm->reduces_on(stream);",
            BY_HAND),
    without("the end of backward does not know of reductions", REDUCE, "shared.reduces_on(*reduction_->stream);",
            STREAMS),
    without("the end of backward does not know of all-reduces", REDUCE, "shared.reduces_on(*streams.all_reduce);",
            PENDING),
    without("the end of backward waits for no stream", CONTEXT,
            "if (stream != current) order_streams(stream, current);", STREAMS),
    without("gradients reduced by hand are not waited for", REDUCE, "context_->comm->wait_for_reductions();", PENDING),
    without("backward's end does not wait for reductions", CONTEXT, "comm.wait_for_reductions();", STREAMS),
    Fault("any number of reductions are in flight", BACKWARD,
            "while (comm.reducing.size() + groups_.size() > max_reducing)",
          "while (!PLANTED && comm.reducing.size() + groups_.size() > max_reducing)", (IN_FLIGHT,)),
    without("what was gathered for nothing stays", CONTEXT,
            "if (group->reshards_after_backward() && !state->forward_running()) group->reshard();", PREFETCHES),
]
