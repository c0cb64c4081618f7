"""Faults of memory: what is handed out, kept and given back; and of the streams' own helpers."""

from fault import Fault, Tests, without

EARLY = Tests("parallel", "EarlyRelease.*", device="cpu")
REENTRANT = Tests("framework", "FsdpReentrantRecompute.*", device="cpu")
PARITY = Tests("parallel", "Each/ReductionStreams.*/added")
MEMORY = Tests("parallel", "FullyShardMemory.*:FullyShardTest.*", device="cpu")
CPU = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group", device="cpu")

STREAMS = "parallel/fsdp/comm_streams.cpp"
FULL = "parallel/fsdp/full_storage.cpp"
GROUP = "parallel/fsdp/fsdp_group.cpp"
STATE = "parallel/fsdp/fsdp_state.cpp"
POOL = "parallel/collectives/buffer_pool.cpp"

FAULTS = [
    without("a stream scope does not end", STREAMS,
            "if (previous_) c10::impl::VirtualGuardImpl(previous_->device_type()).exchangeStream(*previous_);", PARITY),
    without("streams do not wait for events", STREAMS, "if (event_) event_->block(stream);", PARITY),
    without("events are not recorded", STREAMS, "result.event_->record(stream);", PARITY),
    without("gathered parameters keep their memory", GROUP, "if (!param->shares_shard()) param->full().release();", MEMORY),
    without("a weight waits for the end of its unit's backward", GROUP, "param.full().release();", EARLY, after="param.to_sharded();\n  "),
    Fault("a weight goes while a view of it is read", GROUP, "param.full().has_views()", "(!PLANTED && param.full().has_views())", (EARLY,)),
    without("a backward inside another one frees its weights", GROUP,
            "if (torch::autograd::get_current_graph_task_id() != backward_) return;", EARLY),
    without("a unit of which a part runs again in backward frees weights", STATE, "group->releases_one_by_one = false;", REENTRANT),
    without("a forward inside backward finds weights gone", STATE, "group->release_incomplete();", EARLY,
            after="for (const auto& group : groups_) ", before="\n  gather();\n  for"),
    without("a block of the pool is given to two", POOL, "free.pop_back();", CPU, MEMORY),
    Fault("blocks of the pool come from another class", POOL, "auto& free = free_[bytes];",
          "auto& free = free_[PLANTED ? 64 : bytes];", (CPU,)),
]
