"""All faults, those of the sample, and places of ordering that have none."""

import arithmetic
import collectives
import gathers
import memory
import offloads
import reductions
import rings

FAULTS = [*gathers.FAULTS, *reductions.FAULTS, *memory.FAULTS, *offloads.FAULTS, *collectives.FAULTS,
          *rings.FAULTS, *arithmetic.FAULTS]

# Of most kinds one, from few files, because each is compiled.
SAMPLE = {
    "a gather does not wait for its packing",
    "the event of a gather is recorded before it",
    "a gathered buffer is freed while it is copied out",
    "sources of packing are freed before they are copied",
    "slices for backward are packed before they are written",
    "a held buffer is dropped one wait later in forward",
    "a reduction does not wait for gradients",
    "reduced buffers are not held",
}

AT_ONCE = ("a collective whose result the host reads at once: without the wait nothing works on a CPU, and on a "
           "GPU it is nothing")
OVERLAP = "beside the computation or in its stream, the order is the same: what it is for is speed"
# (file, text of the line): why
REASONS = {
    ("parallel/collectives/process_group.cpp", "all_gather_into(gathered"): AT_ONCE,
    ("framework/modules/fsdp2_mixin.cpp", "group.broadcast(first, 0)"): AT_ONCE,
    ("parallel/sequence_parallel/sequence_shard.cpp", "shard.group->all_gather_into(all"): AT_ONCE,
    ("framework/training/generation.cpp", "shard.group->all_reduce(here"): AT_ONCE,
    ("framework/training/generation.cpp", "ranks.all->all_reduce(number"): AT_ONCE,
    ("framework/serving/loss_server.cpp", "sharing_->broadcast(size"): AT_ONCE,
    ("framework/serving/loss_server.cpp", "sharing_->broadcast(data"): AT_ONCE,
    ("framework/training/unit_planner.cpp", "group->all_gather_into(whole"): AT_ONCE,
    ("framework/training/unit_planner.cpp", "group->reduce_scatter_into(part"): AT_ONCE,
    ("framework/training/unit_planner.cpp", "world_->all_reduce("): AT_ONCE,
    ("framework/training/step_timers.cpp", "group_->all_gather_into(all"): AT_ONCE,
    ("framework/training/train_step.cpp", "group_->all_reduce(terms"): AT_ONCE,
    ("framework/training/train_step.cpp", "group_->all_reduce(value"): AT_ONCE,
    ("framework/training/step_reader.cpp", "group_->all_gather_into(all"): AT_ONCE,
    ("parallel/tensor_parallel/tensor_parallel_regions.cpp", "group.all_gather_into("): AT_ONCE,
    ("parallel/tensor_parallel/tensor_parallel_regions.cpp", "group.reduce_scatter_into("): AT_ONCE,
    ("checkpoint/weights/published_tensors.cpp", "ranks->all_gather_into("): AT_ONCE,
    ("models/kernels/cross_entropy.cpp", "ranks.all_gather_into("): AT_ONCE,
    ("models/kernels/cross_entropy.cpp", "ranks.all_reduce("): AT_ONCE,
    ("models/kernels/head_outputs.cpp", "ranks->all_reduce("): AT_ONCE,
    ("parallel/fsdp/detail/fsdp_param_group.cpp",
            "param->wait_for_offloaded_grad();"): "the loop of wait_for_host_memory",
    ("parallel/fsdp/detail/fsdp_context.cpp",
            "held_reduction_ = "): "what is held, or no longer; the order is in the event",
    ("parallel/fsdp/detail/fsdp_context.cpp", "const StreamEvent written"): "the event of the wait behind it",
    ("parallel/fsdp/detail/fsdp_context.cpp", "comm->drop_held_gather();"):
        "after a backward that threw; the next gather drops it otherwise",
    ("parallel/sequence_parallel/ring_attention.cpp", "const StreamScope scope(ring.stream)"): OVERLAP,
    ("framework/recompute/offloaded_storage.cpp", "const StreamScope scope(streams_.out)"): OVERLAP,
    ("framework/recompute/offloaded_storage.cpp", "const StreamScope scope(streams_.back)"): OVERLAP,
}
