"""Plants faults into a copy of parallel/ and runs the random trees on each: a fault that passes is a hole in them.

usage: mutations.py SECONDS [SEED]   tries faults in random order until the time is over; 0 seconds: all of them.
"""

import os
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Beside the checkout, not in it: the compiler's lists of headers are relative to the build folder.
COPY = ROOT.with_name(ROOT.name + ".faults")
CASES = "160"
BUILD = os.environ.get("MEGASHARD_BUILD", "build")

# name, file of parallel/, text, what it becomes
FAULTS = [
    ("replicas are not counted in the divisor", "gradient_scaling.cpp", "shard_ranks * replicas;", "shard_ranks;"),
    ("sums are not divided", "fsdp_reduce.cpp", "if (reduction->scaling.after != 1)", "if (false)"),
    ("a sum instead of an average", "fsdp_reduce.cpp", "const auto op = reduction.scaling.scatter;",
     "const auto op = ReduceOp::kSum;"),
    ("gather is not waited for", "gather_plan.cpp", "for (auto& work : works_) work.wait();", ""),
    ("reduce-scatter is not waited for", "fsdp_reduce.cpp",
     "for (auto& buffer : reduction_->buffers) buffer.work.wait();\n  if (streams", "if (streams"),
    ("every rank sends from the first rank's place", "gather_plan.cpp",
     "direct ? 0 : rank() * packed_bytes_ + piece.offset", "direct ? 0 : piece.offset"),
    ("ranks' pieces are a rank apart on the way out", "shard_copies.cpp",
     "copy.from = element_at(chunks.first, in_chunks, chunks.dtype);",
     "copy.from = element_at(chunks.first, in_chunks + chunk_stride, chunks.dtype);"),
    ("full parameters outlive an optimizer's step", "fsdp_group.cpp",
     "if (context_ != nullptr && context_->idle()) release();", ""),
    ("kept slices outlive an optimizer's step", "fsdp_state.cpp",
     "if (group->state() == FsdpGroup::State::kPostForward) group->release();", ""),
    ("another rank's slice is kept", "gather_plan.cpp", "std::min(rank() * piece.bytes, full.numel())",
     "std::min((ranks() - 1 - rank()) * piece.bytes, full.numel())"),
    ("a missing gradient is not zero", "shard_copies.cpp", ".to_stride = chunks.stride,\n                      .zero_rest = true});",
     ".to_stride = chunks.stride});"),
    ("runs of another dimension are misplaced", "shard_copies.cpp", "chunk_run, rank * chunk_run, rank * stride);",
     "chunk_run, 0 * chunk_run, rank * stride);"),
    ("accumulation forgets all but the last", "fsdp_reduce.cpp", "accumulated.add_(gradient);\n    } else",
     "accumulated = gradient.to(reduce_dtype());\n    } else"),
    ("what was accumulated is not reduced", "fsdp_reduce.cpp", "if (!accumulated.defined()) return gradient;",
     "return gradient;"),
    ("a second reduction replaces the first", "fsdp_param.cpp",
     "add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());",
     "copy_elements(mine.data_ptr(), rows.scalar_type(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());"),
    ("partial sums of replicas are lost", "fsdp_reduce.cpp", "reduction_->buffers.at(i).output.add_(partial_[i]);", "{}"),
    ("a gradient that no rank had is zero", "fsdp_reduce.cpp", "if (!somebody_had(entry)) continue;", ""),
    ("replicas are not reduced", "fsdp_reduce.cpp", "if (layout_.replicate_group == nullptr) {\n    const auto& own",
     "if (true) {\n    const auto& own"),
    ("param_dtype is ignored", "fsdp_param.cpp", "compute_dtype_ = converts ? *param_dtype : stored_dtype();",
     "compute_dtype_ = stored_dtype();"),
    ("inputs are not cast", "fsdp_state.cpp", "if (policy_.cast_forward_inputs && policy_.param_dtype)", "if (false)"),
    ("outputs are not cast", "fsdp_state.cpp", "if (policy_.output_dtype)", "if (false)"),
    ("reduce_dtype is ignored", "fsdp_reduce.cpp", "if (policy_.reduce_dtype) return *policy_.reduce_dtype;", ""),
    ("a recompute that stops early frees the unit", "fsdp_state.cpp", "give_up_forward(/*parameters_too=*/false);",
     "give_up_forward(/*parameters_too=*/true);"),
    ("backward does not gather", "fsdp_state.cpp", "    if (group->unshard_in_backward) {\n      group->wait",
     "    if (false) {\n      group->wait"),
    ("the place of local rows is wrong", "fsdp_param.cpp", "geometry_.offsets(rank_), layout_.mesh",
     "geometry_.offsets(0), layout_.mesh"),
    ("the last reduction is left in flight", "fsdp_state.cpp",
     "while (!comm.reducing.empty()) comm.reducing.front()->finish_reduce();", "comm.reducing.clear();"),
    ("units without a backward of their own owe nothing", "fsdp_reduce.cpp",
     "return reduce_gradients && (unreduced_ || (all_reduce_gradients && !partial_.empty()));", "return false;"),
    ("a gradient is used where its parameter is not", "fsdp_param.cpp",
     "at::Tensor& mine = stashed_ ? stashed_gradient_ : parameter_.mutable_grad();",
     "at::Tensor& mine = parameter_.mutable_grad();"),
]


def run(*command, timeout=None, env=None):
    return subprocess.run(command, cwd=COPY, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})})


def build():
    done = run("ninja", "-C", "build", "-j", str(os.cpu_count()), "tests/differential/differential_tests")
    return None if done.returncode == 0 else done.stdout[-3000:]


def trees_pass():
    try:
        done = run("build/tests/differential/differential_tests", timeout=180, env={"MEGASHARD_TREE_CASES": CASES})
    except subprocess.TimeoutExpired:
        return False, "did not end"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "tree of seed" in line or "Error" in line]
    return done.returncode == 0, (lines or [f"exit code {done.returncode}"])[0].strip()[:160]


def prepare():
    """Copies the tree with what is built in it, so that a fault costs one compilation."""
    COPY.mkdir(parents=True, exist_ok=True)
    for name in sorted(path.name for path in ROOT.iterdir() if path.name not in (".git", "run", "build", BUILD)):
        subprocess.run(["cp", "-a", ROOT / name, COPY], check=True)
    subprocess.run(["cp", "-a", "-T", ROOT / BUILD, COPY / "build"], check=True)
    broken = build()
    assert broken is None, broken
    passed, why = trees_pass()
    assert passed, f"the trees fail without a fault: {why}"


def use_copy(file):
    """Unity blocks name their sources by absolute paths."""
    for block in (COPY / "build/parallel").rglob("*unity*.cpp"):
        text = block.read_text()
        if f"/parallel/{file}" in text:
            block.write_text(text.replace(f"{ROOT}/", f"{COPY}/"))


def main():
    seconds = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1000)
    faults = FAULTS.copy()
    random.Random(seed).shuffle(faults)
    print(f"seed {seed}, {len(faults)} faults", flush=True)
    start = time.monotonic()
    prepare()
    caught = missed = 0
    for name, file, text, fault in faults:
        if seconds and time.monotonic() - start > seconds and caught + missed > 0:
            break
        path = COPY / "parallel" / file
        original = path.read_text()
        use_copy(file)
        assert original.count(text) == 1, f"{file} has {original.count(text)} places of: {text}"
        path.write_text(original.replace(text, fault))
        try:
            broken = build()
            assert broken is None, f"{name}: {broken}"
            passed, why = trees_pass()
        finally:
            path.write_text(original)
        caught, missed = caught + (not passed), missed + passed
        print(f"{'MISSED' if passed else 'caught'}: {name}" + ("" if passed else f" ({why})"), flush=True)
    print(f"{caught} passed, {missed} failed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
