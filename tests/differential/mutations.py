"""Plants faults into a copy of parallel/ and runs the random trees with each: a fault that passes is a hole in them.

usage: mutations.py
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Beside the checkout, not in it: the compiler's lists of headers are relative to the build folder.
COPY = ROOT.with_name(ROOT.name + ".faults")
CASES = "160"
BUILD = os.environ.get("MEGASHARD_BUILD", "build")

# name, file of parallel/, text, what it becomes: the same but where PLANTED, which is true in one run only
FAULTS = [
    ("replicas are not counted in the divisor", "fsdp/gradient_scaling.cpp", "shard_ranks * replicas;",
     "shard_ranks * (PLANTED ? 1 : replicas);"),
    ("sums are not divided", "fsdp/fsdp_reduce.cpp", "if (reduction->scaling.after != 1)",
     "if (!PLANTED && reduction->scaling.after != 1)"),
    ("a sum instead of an average", "fsdp/fsdp_reduce.cpp", "const auto op = reduction.scaling.scatter;",
     "const auto op = PLANTED ? ReduceOp::kSum : reduction.scaling.scatter;"),
    ("gather is not waited for", "fsdp/gather_plan.cpp", "for (auto& work : works_) work.wait();",
     "if (!PLANTED) for (auto& work : works_) work.wait();"),
    ("reduce-scatter is not waited for", "fsdp/fsdp_reduce.cpp",
     "for (auto& buffer : reduction_->buffers) buffer.work.wait();\n  if (streams",
     "if (!PLANTED) for (auto& buffer : reduction_->buffers) buffer.work.wait();\n  if (streams"),
    ("every rank sends from the first rank's place", "fsdp/gather_plan.cpp",
     "direct ? 0 : rank() * packed_bytes_ + piece.offset",
     "direct ? 0 : (PLANTED ? 0 : rank() * packed_bytes_) + piece.offset"),
    ("ranks' pieces are a rank apart on the way out", "fsdp/shard_copies.cpp",
     "copy.from = element_at(chunks.first, in_chunks, chunks.dtype);",
     "copy.from = element_at(chunks.first, in_chunks + (PLANTED ? chunk_stride : 0), chunks.dtype);"),
    ("full parameters outlive an optimizer's step", "fsdp/fsdp_group.cpp",
     "if (context_ != nullptr && context_->idle()) release();",
     "if (!PLANTED && context_ != nullptr && context_->idle()) release();"),
    ("another rank's slice is kept", "fsdp/gather_plan.cpp", "std::min(rank() * piece.bytes, full.numel())",
     "std::min((PLANTED ? ranks() - 1 - rank() : rank()) * piece.bytes, full.numel())"),
    ("a missing gradient is not zero", "fsdp/shard_copies.cpp", ".zero_rest = true});", ".zero_rest = !PLANTED});"),
    ("runs of another dimension are misplaced", "fsdp/shard_copies.cpp", "chunk_run, rank * chunk_run, rank * stride);",
     "chunk_run, PLANTED ? 0 : rank * chunk_run, rank * stride);"),
    ("accumulation forgets all but the last", "fsdp/fsdp_reduce.cpp", "accumulated.add_(gradient);\n    } else",
     "if (PLANTED) accumulated = gradient.to(reduce_dtype()); else accumulated.add_(gradient);\n    } else"),
    ("what was accumulated is not reduced", "fsdp/fsdp_reduce.cpp", "if (!accumulated.defined()) return gradient;",
     "if (PLANTED || !accumulated.defined()) return gradient;"),
    ("a second reduction replaces the first", "fsdp/fsdp_param.cpp",
     "add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());",
     "if (PLANTED) copy_elements(mine.data_ptr(), rows.scalar_type(), rows.const_data_ptr(), rows.scalar_type(), "
     "rows.numel()); else add_elements(mine.data_ptr(), rows.const_data_ptr(), rows.scalar_type(), rows.numel());"),
    ("partial sums of replicas are lost", "fsdp/fsdp_reduce.cpp", "reduction_->buffers.at(i).output.add_(partial_[i]);",
     "if (!PLANTED) reduction_->buffers.at(i).output.add_(partial_[i]);"),
    ("replicas are not reduced", "fsdp/fsdp_reduce.cpp", "if (layout_.replicate_group == nullptr) {\n    const auto& own",
     "if (PLANTED || layout_.replicate_group == nullptr) {\n    const auto& own"),
    ("param_dtype is ignored", "fsdp/fsdp_param.cpp", "compute_dtype_ = converts ? *param_dtype : stored_dtype();",
     "compute_dtype_ = converts && !PLANTED ? *param_dtype : stored_dtype();"),
    ("inputs are not cast", "fsdp/fsdp_state.cpp", "if (policy_.cast_forward_inputs && policy_.param_dtype)",
     "if (!PLANTED && policy_.cast_forward_inputs && policy_.param_dtype)"),
    ("outputs are not cast", "fsdp/fsdp_state.cpp", "if (policy_.output_dtype)", "if (!PLANTED && policy_.output_dtype)"),
    ("reduce_dtype is ignored", "fsdp/fsdp_reduce.cpp", "if (policy_.reduce_dtype) return *policy_.reduce_dtype;",
     "if (!PLANTED && policy_.reduce_dtype) return *policy_.reduce_dtype;"),
    ("backward does not gather", "fsdp/fsdp_state.cpp", "    if (group->unshard_in_backward) {\n      group->wait",
     "    if (!PLANTED && group->unshard_in_backward) {\n      group->wait"),
    ("the place of local rows is wrong", "fsdp/fsdp_param.cpp", "geometry_.offsets(rank_), layout_.mesh",
     "geometry_.offsets(PLANTED ? 0 : rank_), layout_.mesh"),
    ("the last reduction is left in flight", "fsdp/fsdp_state.cpp",
     "while (!comm.reducing.empty()) comm.reducing.front()->finish_reduce();",
     "if (PLANTED) comm.reducing.clear(); else while (!comm.reducing.empty()) comm.reducing.front()->finish_reduce();"),
    ("a gradient is used where its parameter is not", "fsdp/fsdp_param.cpp",
     "at::Tensor& mine = stashed_ ? stashed_gradient_ : parameter_.mutable_grad();",
     "at::Tensor& mine = stashed_ && !PLANTED ? stashed_gradient_ : parameter_.mutable_grad();"),
]

HEADER = """#pragma once
#include <cstdlib>
inline bool planted(int fault) {
  static const char* const chosen = std::getenv("MEGASHARD_PLANTED_FAULT");
  return chosen != nullptr && std::atoi(chosen) == fault;
}
"""


def prepare():
    """A copy of the tree and of what is built in it, with all faults compiled in: one build for all runs."""
    COPY.mkdir(parents=True, exist_ok=True)
    for name in sorted(path.name for path in ROOT.iterdir() if path.name not in (".git", "run", "build", BUILD)):
        subprocess.run(["cp", "-a", ROOT / name, COPY], check=True)
    subprocess.run(["cp", "-a", "-T", ROOT / BUILD, COPY / "build"], check=True)
    (COPY / "parallel/planted_fault.h").write_text(HEADER)
    for file in sorted({file for _, file, _, _ in FAULTS}):
        text = (COPY / "parallel" / file).read_text()
        for number, (name, where, before, after) in enumerate(FAULTS, 1):
            if where != file:
                continue
            assert text.count(before) == 1, f"{file} has {text.count(before)} places of '{name}': {before}"
            text = text.replace(before, after.replace("PLANTED", f"planted({number})"))
        (COPY / "parallel" / file).write_text('#include "parallel/planted_fault.h"\n' + text)
    for block in (COPY / "build/parallel").rglob("*unity*.cpp"):  # they name their sources by absolute paths
        block.write_text(block.read_text().replace(f"{ROOT}/", f"{COPY}/"))
    done = subprocess.run(["ninja", "-C", "build", "tests/differential/differential_tests"], cwd=COPY,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def run_trees(number):
    """Whether the trees pass with a fault (0: with none), and what they say."""
    environment = {**os.environ, "MEGASHARD_TREE_CASES": CASES, "MEGASHARD_PLANTED_FAULT": str(number)}
    try:
        done = subprocess.run("build/tests/differential/differential_tests", cwd=COPY, capture_output=True, text=True,
                              timeout=600, env=environment)
    except subprocess.TimeoutExpired:
        return False, "did not end"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "tree of seed" in line or "Error" in line]
    return done.returncode == 0, (lines or [f"exit code {done.returncode}"])[0].strip()[:160]


def main():
    prepare()
    passed, why = run_trees(0)
    assert passed, f"the trees fail without a fault: {why}"
    caught = missed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = pool.map(run_trees, range(1, len(FAULTS) + 1))
        for (name, _, _, _), (passed, why) in zip(FAULTS, runs):
            caught, missed = caught + (not passed), missed + passed
            print(f"{'MISSED' if passed else 'caught'}: {name}" + ("" if passed else f" ({why})"), flush=True)
    print(f"{caught} passed, {missed} failed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
