"""Faults of memory: allocation, reuse and release; and of the streams' helpers."""

from fault import Fault, Tests, without

EARLY = Tests("parallel", "EarlyRelease.*", device="cpu")
REENTRANT = Tests("framework", "FsdpReentrantRecompute.*", device="cpu")
PARITY = Tests("parallel", "Each/ReductionStreams.*/added")
MEMORY = Tests("parallel", "FullyShardMemory.*:FullyShardTest.*", device="cpu")
CPU = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group", device="cpu")
RANGES = Tests("parallel", "RangeAllocator.*", device="cpu")

STREAMS = "parallel/device/streams.cpp"
FULL = "parallel/fsdp/detail/unsharded_storage.cpp"
GROUP = "parallel/fsdp/detail/fsdp_param_group.cpp"
PARAM = "parallel/fsdp/detail/fsdp_param.cpp"
STATE = "parallel/fsdp/detail/fsdp_state.cpp"
POOL = "parallel/device/buffer_pool.cpp"
RANGE = "parallel/device/range_allocator.cpp"

FAULTS = [
    without("a stream scope does not end", STREAMS,
            "if (previous_) c10::impl::VirtualGuardImpl(previous_->device_type()).exchangeStream(*previous_);", PARITY),
    without("streams do not wait for events", STREAMS, "if (event_) event_->block(stream);", PARITY),
    without("events are not recorded", STREAMS, "result.event_->record(stream);", PARITY),
    without("gathered parameters keep their memory", PARAM,
            "if (!aliases_sharded_param_ && !group_->keep_unsharded_storage) unsharded_.release();",
            MEMORY),
    without("a weight waits for the end of its unit's backward", GROUP, "param.free_unsharded();", EARLY),
    Fault("a weight goes while a view of it is read", GROUP, "param.unsharded().has_views()",
            "(!PLANTED && param.unsharded().has_views())", (EARLY,)),
    without("a backward inside another one frees its weights", GROUP,
            "if (torch::autograd::get_current_graph_task_id() != backward_) return;", EARLY),
    without("a unit of which a part runs again in backward frees weights", STATE,
            "group->reshards_one_by_one = false;", REENTRANT),
    without("a forward inside backward finds weights gone", STATE, "group->reshard_if_partial();", EARLY,
            after="for (const auto& group : groups_) ", before="\n  const bool gathers"),
    without("a block of the pool is given to two", POOL, "free.pop_back();", CPU, MEMORY),
    Fault("blocks of the pool come from another class", POOL, "auto& free = free_[of_class];",
          "auto& free = free_[PLANTED ? 64 : of_class];", (CPU,)),
    without("a large block of the pool is given to two", RANGE, "remove(free_.find(offset));", RANGES),
    Fault("free memory stays in pieces", RANGE, "before->first + before->second == offset",
          "!PLANTED && before->first + before->second == offset", (RANGES,)),
]
