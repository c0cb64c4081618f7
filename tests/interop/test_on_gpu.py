"""tests/gpu without a GPU: its pack runs from another folder, and no line's end ends the others."""
import json
import os
import shutil
import sys
import time

import pytest

import gtests
import megashard
import smoke
from kernel_trace import device_figures
from lines import Failure, Line, Runner
from megashard import ROOT
from training import Training, read_steps


def run(*command, **options):
    return megashard.run(*command, expect=None, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, **options)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A pack that was laid, and moved from where it was laid."""
    folder = tmp_path_factory.mktemp("pack")
    laid = run(ROOT / "tests" / "gpu", "--pack", folder / "laid")
    assert laid.returncode == 0, laid.stdout + laid.stderr
    return (folder / "laid").rename(folder / "carried elsewhere")


def dry_run(pack, mode, output, device="sim"):
    done = run(pack / "tests" / "gpu", f"--{mode}", "--dry-run", "--device", device, "--output", output,
               cwd=output.parent)
    found = json.loads((output / f"{mode}.json").read_text())
    return done, found, {line["name"]: line for line in found["lines"]}


def test_the_pack_needs_nothing_of_the_tree(elsewhere):
    assert sum(path.stat().st_size for path in elsewhere.rglob("*") if path.is_file()) <= 60 << 20
    for kernels in ("parallel/cuda/batched_copy.cu", "models/kernels/gpu/rms_norm.cu"):
        assert (elsewhere / kernels).exists()
    code = ("import sys; sys.path.insert(0, 'tests/on_gpu'); import machine, pack\n"
            "for each in [*machine.BUILD.rglob('*.so'), machine.PROGRAM, *machine.BUILD.glob('tests/*/*_tests')]:\n"
            "    for name, path in pack.needed_libraries(each): print(path)")
    listed = run(sys.executable, "-c", code, cwd=elsewhere)
    assert listed.returncode == 0, listed.stderr
    places = listed.stdout.split("\n")
    assert any("/build/libmegashard.so" in place for place in places)
    assert not [place for place in places if place.startswith(str(ROOT)) or "not found" in place]


def test_smoke_from_a_pack(elsewhere, tmp_path):
    done, found, lines = dry_run(elsewhere, "smoke", tmp_path / "results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["machine"]["dry_run"] and found["machine"]["device"] == "sim" and found["seconds"] < 540
    for name in ("fp32", "bf16, reduced in bf16, 4 microbatches", "offload_to_cpu, no cached memory",
                 "fp32, saved, resumed"):
        assert lines[name]["outcome"] == "passed" and lines[name]["figures"]["difference"] < 1e-4, lines[name]
    assert {line["outcome"] for line in lines.values()} <= {"passed", "skipped"}
    for kernels in ("CudaKernels.", "CudaRowKernels."):
        assert any(name.startswith(kernels) for name in lines)
    tests = [line for name, line in lines.items() if "." in name]
    assert sum(line["outcome"] == "passed" for line in tests) >= 8
    assert all(line["why"].startswith("not run on the simulated device: ") for line in tests
               if line["outcome"] == "skipped")
    table = (tmp_path / "results" / "smoke.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in table) == 1 + len(lines)
    passed = sum(line["outcome"] == "passed" for line in lines.values())
    assert done.stdout.splitlines()[-1].startswith(f"{passed} passed, 0 failed, {len(lines) - passed} skipped")


def test_speeds_from_a_pack(elsewhere, tmp_path):
    for mode, size in (("mfu", "7 B, recompute"), ("peers", "0.5 B, megashard")):
        done, _, lines = dry_run(elsewhere, mode, tmp_path / "results")
        assert done.returncode == 0, done.stdout + done.stderr
        assert lines[size]["figures"]["tokens/s"] > 0 and lines[size]["figures"]["peak memory (GiB)"] > 0
    peers = lines["0.5 B, torch compiled"]["figures"]["tokens/s"]
    assert lines[size]["figures"]["x torch compiled"] == pytest.approx(lines[size]["figures"]["tokens/s"] / peers)


def test_failures_end_nothing(elsewhere, tmp_path):
    """A pack without the training library: every line runs, and names the missing library."""
    broken = tmp_path / "broken"
    shutil.copytree(elsewhere, broken)
    (broken / "build" / "launch" / "libmegashard_programs.so").unlink()
    done, _, lines = dry_run(broken, "mfu", tmp_path / "results", device="cpu")
    assert done.returncode == 1 and f" {len(lines) - 1} failed, " in done.stdout.splitlines()[-1]
    others = {"torch computes here"}
    for line in (line for name, line in lines.items() if name not in others):
        assert line["outcome"] == "failed" and "libmegashard_programs.so" in line["why"], line


def test_without_a_gpu_it_says_so_and_ends_well():
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    done = run(ROOT / "tests" / "gpu")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "0 passed, 0 failed, 1 skipped"


def run_lines(tmp_path, seconds, *lines):
    results = []
    begin = time.monotonic()
    Runner(begin + seconds, tmp_path / "log", results.append).run_together(lines)
    return {result.name: result for result in results}, time.monotonic() - begin


def test_a_line_that_hangs_ends_at_its_limit_with_what_it_started(tmp_path):
    alive = tmp_path / "alive"
    hangs = Line("hangs", ["bash", "-c", f"(sleep 3; touch {alive}) & echo waiting; sleep 60"], 0.5, dict(os.environ))
    fails = Line("fails", ["bash", "-c", "echo an error:; echo it was so; exit 3"], 5, dict(os.environ))
    crashes = Line("crashes", ["bash", "-c", "kill -SEGV $$"], 5, dict(os.environ))
    strange = Line("strange", ["true"], 5, dict(os.environ), judge=lambda output: {"x": 1 / 0})
    works = Line("works", ["true"], 5, dict(os.environ), judge=lambda output: {"x": 1})
    results, seconds = run_lines(tmp_path, 60, hangs, fails, crashes, strange, works)
    assert {name: each.outcome for name, each in results.items()} == {
        "hangs": "timed out", "fails": "failed", "crashes": "failed", "strange": "failed", "works": "passed"}
    assert results["fails"].why == "exit code 3: an error: it was so" and "SIGSEGV" in results["crashes"].why
    assert seconds < 3
    time.sleep(3.5 - seconds)
    assert not alive.exists()
    assert "waiting" in (tmp_path / "log").read_text()


def test_lines_share_the_time_that_is_left(tmp_path):
    slow = [Line(f"slow {i}", ["sleep", "60"], 40, dict(os.environ)) for i in range(3)]
    results, seconds = run_lines(tmp_path, 3, *slow)
    assert seconds < 4
    assert [results[line.name].outcome for line in slow] == ["timed out", "skipped", "skipped"]


def steps(*losses, norm=1.0):
    return [{"step": i + 1, "loss": loss, "grad_norm": norm} for i, loss in enumerate(losses)]


def test_other_numbers_are_noticed(tmp_path):
    training = Training(machine=None, scratch=tmp_path)
    training.steps["before"] = steps(2.0, 1.5, 1.0)
    judge = training.same_as("before", 1e-4)
    assert judge(steps(2.0, 1.5, 1.00001), "")["difference"] == pytest.approx(1e-5)
    for wrong in (steps(2.0, 1.5, 1.001), steps(2.0, norm=1.01), steps(float("nan"))):
        with pytest.raises(Failure, match="differs from 'before'"):
            judge(wrong, "")
    with pytest.raises(Failure, match="no step in common"):
        judge([{"step": 9, "loss": 1.0, "grad_norm": 1.0}], "")
    with pytest.raises(Failure, match="did not train"):
        training.same_as("another", 1e-4)(steps(1.0), "")
    (tmp_path / "metrics").write_text('{"step":1,"loss":null,"grad_norm":1.0}\n')
    with pytest.raises(Failure, match="not a number"):
        read_steps(tmp_path / "metrics")


def test_a_test_that_sees_no_gpu_where_there_is_one_fails(tmp_path):
    result = tmp_path / "x.xml"
    suite = '<testsuites><testsuite name="S"><testcase name="t" classname="S">{}</testcase></testsuite></testsuites>'
    result.write_text(suite.format('<skipped message="x.cpp:3&#x0A;no GPU on this machine"/>'))
    assert gtests.seen(result, has_gpu=False) == {"skipped": "no GPU on this machine"}
    with pytest.raises(Failure, match="does not see the GPU"):
        gtests.seen(result, has_gpu=True)
    result.write_text(suite.format(""))
    assert gtests.seen(result, has_gpu=True) == {}
    result.write_text("<testsuites/>")
    with pytest.raises(Failure, match="no such test"):
        gtests.seen(result, has_gpu=True)
    with pytest.raises(Failure, match="printed no 'NCCL version'"):
        smoke.when_printed("NCCL version", lambda output: {})("no such words")


def test_what_tools_print_is_read():
    def kernel(name, begin, microseconds):
        return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds}

    events = [kernel("gemm(int)", 100, 250), {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
              kernel("void copy<float>(Table)", 380, 1500), kernel("void copy<float>(Table)", 1000, 1000)]
    figures = device_figures(json.dumps({"traceEvents": events}))
    assert figures["kernels"] == 3 and figures["busy (ms)"] == pytest.approx(1.87)
    assert figures["idle (ms)"] == pytest.approx(0.03) and figures["long gaps"] == 1
    assert figures["longest"][0] == {"kernel": "copy<float>", "launches": 2, "ms": 2.5}
    with pytest.raises(Failure, match="no kernel"):
        device_figures('{"traceEvents": []}')
    listed = "Running main() from x.cc\nCudaA.\n  one\n  two\nCuda/B.\n  three/0  # GetParam() = 0\n"
    assert list(gtests.names(listed)) == ["CudaA.one", "CudaA.two", "Cuda/B.three/0"]
