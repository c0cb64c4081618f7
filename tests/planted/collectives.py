"""Faults of collectives that are waited for at once. On a GPU that wait is nothing: the collective runs on the current
stream. On a CPU it is the exchange itself, so the tests run there."""

from fault import Fault, Tests

NORM = "parallel/fsdp/grad_norm.cpp"


def not_waited_for(name, file, call, tests):
    return Fault(f"{name} is not waited for", file, call + ".wait();",
                 f"if (auto work = {call}; !PLANTED) work.wait();", (tests,))


def on_cpu(room, names):
    return Tests(room, names, device="cpu")


FAULTS = [
    not_waited_for("the all-reduce of gradient norms", NORM, "group->all_reduce(shared, op)",
                   on_cpu("parallel", "FullyShardClipGradNorm.*")),
    not_waited_for("the all-reduce of overflows", "parallel/fsdp/grad_scaler.cpp",
                   "group->all_reduce(found, ReduceOp::kMax)", on_cpu("parallel", "FullyShardGradScaler.*")),
    not_waited_for("the exchange of a sequence's heads", "parallel/sequence_parallel/ulysses.cpp",
                   "shard.group->all_to_all_into(got.view({-1}), sent.view({-1}))",
                   on_cpu("models", "Ulysses.SomeHeads*")),
    not_waited_for("the sum over tensor-parallel ranks", "parallel/tensor_parallel/tensor_parallel_regions.cpp",
                   "group.all_reduce(sum, ReduceOp::kSum)", on_cpu("parallel", "TensorParallelRegions.*")),
    not_waited_for("the gather of tensor-parallel pieces", "parallel/tensor_parallel/tensor_parallel_regions.cpp",
                   "group.all_gather_into(pieces.view({-1}), mine.view({-1}))",
                   on_cpu("parallel", "TensorParallelRegions.*")),
    not_waited_for("the exchange of counts of experts' rows", "models/moe/expert_parallel.cpp",
                   "ranks_->all_gather_into(gathered, counts.contiguous())",
                   on_cpu("models", "Moe.RanksWithDifferentExperts*")),
    not_waited_for("the exchange of experts' rows", "models/moe/expert_parallel.cpp",
                   "ranks_->all_to_all_into(arrived, rows.contiguous(), {elements(received), elements(sent)})",
                   on_cpu("models", "Moe.RanksWithDifferentExperts*")),
    not_waited_for("the average of replicated gradients", "framework/training/parallel_groups.cpp",
                   "group.all_reduce(buffer, ReduceOp::kAvg)",
                   on_cpu("framework", "Fsdp2Mixin.GradientsOfReplicated*")),
    not_waited_for("the sum of counts at a step's end", "framework/training/train_step.cpp",
                   "group_->all_reduce(all, ReduceOp::kSum)", on_cpu("framework", "*TrainStepCases.*")),
    not_waited_for("the matrices that ranks send each other for Muon", "framework/training/optimizers/muon.cpp",
                   "ranks->all_to_all_into(theirs, mine)", on_cpu("framework", "MuonTest.*")),
    not_waited_for("the return of what Muon made of them", "framework/training/optimizers/muon.cpp",
                   "ranks->all_to_all_into(mine, theirs)", on_cpu("framework", "MuonTest.*")),
]
