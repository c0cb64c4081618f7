"""Faults of gathers: the streams that pack and gather, and the buffers that travel."""

from fault import Fault, Tests, without

PARITY = Tests("parallel", "Each/ReductionStreams.*/added")
STEPS = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group*")
SLICES = Tests("parallel", "FullyShardTraining.test_param_registration_after_backward")
REBOUND = Tests("parallel", "FullyShardInit.test_reset_sharded_param_in_lazy_init")
CURRENT = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group_unshard_async_op")
EARLY = Tests("parallel", "FsdpControls.PrefetchListsMayName*:FsdpControls.OfTheRootReachIt*")
UNSHARD = Tests("parallel", "FullyShardComm.test_unshard*:FsdpControls.UnshardReads*")
OFFLOAD = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group_cpu_offload_eager")
EXTENSION = Tests("parallel", "FullyShardExtensions.Float8TravelsAlongAnyDimensionAndOnOneRank")
MEMORY = Tests("parallel", "GatherBuffers.*")
CPU = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group", device="cpu")

PLAN = "parallel/fsdp/detail/foreach_all_gather.cpp"
GROUP = "parallel/fsdp/detail/fsdp_param_group.cpp"
STATE = "parallel/fsdp/detail/fsdp_state.cpp"
CONTEXT = "parallel/fsdp/detail/fsdp_context.cpp"

FAULTS = [
    Fault("rows are packed on the current stream", PLAN,
          "const StreamScope scope(on_current_stream_ ? std::nullopt : streams.copy_in);",
          "const StreamScope scope(PLANTED || on_current_stream_ ? std::nullopt : streams.copy_in);", (PARITY,)),
    Fault("a gather does not wait for its packing", PLAN,
          "if (streams.enabled()) order_streams(on_current_stream_",
          "if (streams.enabled() && !PLANTED) order_streams(on_current_stream_", (PARITY,)),
    Fault("a gather packed on the current stream waits for another", PLAN,
          "order_streams(on_current_stream_ ? streams.current()",
          "order_streams(on_current_stream_ && !PLANTED ? streams.current()", (CURRENT,)),
    Fault("a gather runs on the current stream", PLAN, "  const StreamScope scope(streams.all_gather);",
          "  const StreamScope scope(PLANTED ? std::nullopt : streams.all_gather);", (PARITY,)),
    without("the event of a gather is not recorded", PLAN, "gathered_ = StreamEvent::record(*streams.all_gather);",
            PARITY,
            after="if (streams.enabled()) "),
    Fault("the event of a gather is recorded before it", PLAN, "  if (packs) {\n    const auto own = flat_view",
          "  auto early = streams.enabled() ? StreamEvent::record(streams.all_gather.value()) : StreamEvent();\n"
          "  if (packs) {\n    const auto own = flat_view", (PARITY,),
          also=(("StreamEvent::record(*streams.all_gather);",
                  "PLANTED ? std::move(early) : StreamEvent::record(*streams.all_gather);"),)),
    without("the event of a gather by one rank is not recorded", PLAN,
            "gathered_ = StreamEvent::record(*streams.copy_in);", EXTENSION, after="if (streams.enabled()) "),
    without("the current stream does not wait for a gather", PLAN,
            "if (streams.enabled()) gathered_.make_wait(streams.current());", PARITY),
    without("the host does not wait for a gather on a CPU", PLAN, "for (auto& work : works_) work.wait();", CPU),
    Fault("a gathered buffer is freed while it is copied out", PLAN, "if (!streams.enabled()) packed_ = at::Tensor();",
          "if (PLANTED || !streams.enabled()) packed_ = at::Tensor();", (PARITY,)),
    Fault("sources of packing are freed before they are copied", PLAN,
          ".row_numel = source.numel(),\n                     .numel = source.numel()});\n",
          ".row_numel = source.numel(),\n                     .numel = source.numel()});\n"
          "  if (PLANTED) sources_.pop_back();\n", (OFFLOAD,)),
    without("slices for backward are packed before they are written", GROUP,
            "if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);", SLICES),
    without("new data of parameters is packed before it is there", GROUP,
            "if (rebound && streams.enabled()) order_streams(streams.current(), *streams.copy_in);", REBOUND),
    without("a held buffer is dropped one wait later in forward", GROUP, "if (in_forward) shared.drop_held_gather();",
            MEMORY),
    without("a held buffer is replaced without a wait", CONTEXT, "drop_held_gather();", MEMORY,
            before="\n  held_gather_ = std::move"),
    without("a buffer is held until an older event", CONTEXT, "copied_out_ = StreamEvent::record(streams.current());",
            PARITY),
    Fault("a gathered buffer is not held", GROUP,
            "if (at::Tensor packed = unsharding_->take_packed(); packed.defined()) {",
          "if (at::Tensor packed = unsharding_->take_packed(); packed.defined() && !PLANTED) {", (PARITY,)),
    without("a held buffer is dropped one wait later in backward", GROUP,
            "if (!in_forward) shared.drop_held_gather();", MEMORY),
    without("packing does not wait for the reader of a held buffer", CONTEXT,
            "copied_out_.make_wait(*streams.copy_in);", PARITY),
    without("packing does not wait for the optimizer", CONTEXT, "written.make_wait(*streams().copy_in);", STEPS),
    without("the last held buffer outlives forward", CONTEXT, "comm->drop_held_gather();", MEMORY,
            after="set_autocast_cache_enabled(autocast_cache_);\n  "),
    without("unshard does not wait for the weights", STATE,
            "if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);", UNSHARD,
            after="ensure_context().streams();\n  "),
    without("new streams of a unit before its root has run do not wait for the weights", CONTEXT,
            "if (streams.enabled()) order_streams(streams.current(), *streams.copy_in);", EARLY,
            before="\n  }\n  return *context_;"),
]
