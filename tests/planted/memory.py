"""Faults of memory: what is handed out, kept and given back; and of the streams' own helpers."""

from fault import Fault, Tests, without

PARITY = Tests("parallel", "Each/ReductionStreams.*/added")
MEMORY = Tests("parallel", "FullyShardMemory.*:FullyShardTest.*", device="cpu")
CPU = Tests("parallel", "FullyShardTraining.test_train_parity_multi_group", device="cpu")

STREAMS = "parallel/fsdp/comm_streams.cpp"
FULL = "parallel/fsdp/full_storage.cpp"
GROUP = "parallel/fsdp/fsdp_group.cpp"
POOL = "parallel/collectives/buffer_pool.cpp"

FAULTS = [
    without("a stream scope does not end", STREAMS,
            "if (previous_) c10::impl::VirtualGuardImpl(previous_->device_type()).exchangeStream(*previous_);", PARITY),
    without("streams do not wait for events", STREAMS, "if (event_) event_->block(stream);", PARITY),
    without("events are not recorded", STREAMS, "result.event_->record(stream);", PARITY),
    without("gathered parameters keep their memory", GROUP, "if (!param->shares_shard()) param->full().release();", MEMORY),
    without("a block of the pool is given to two", POOL, "free.pop_back();", CPU, MEMORY),
    Fault("blocks of the pool come from another class", POOL, "auto& free = free_[bytes];",
          "auto& free = free_[PLANTED ? 64 : bytes];", (CPU,)),
]
