"""megashard convert: damage is found, and nothing of a run is replaced; what is wrong is said in one message."""

import os

import torch
import torch.distributed.checkpoint as dcp

from megashard import TRACKER, convert
from test_convert import small_model


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_flipped_bit_is_not_converted(tmp_path):
    """Any converter that reads the step names the file in its message, and writes nothing."""
    small_model(tmp_path / "hf", tie_word_embeddings=False)
    convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    convert("hf_to_torch_dist", "--hf-dir", tmp_path / "hf", "--save-dir", tmp_path / "dist")
    assets = ("--model-assets-dir", tmp_path / "hf")
    for kind, words in (("dcp", ("dcp_to_hf", "--save-dir", tmp_path / "x", *assets, "--load-dir")),
                        ("dcp", ("dcp_to_torch", "--torch-save-path", tmp_path / "x", "--dcp-checkpoint-dir")),
                        ("dcp", ("dcp_to_torch_dist", "--save-dir", tmp_path / "x", "--load-dir")),
                        ("dist", ("torch_dist_to_hf", "--save-dir", tmp_path / "x", *assets, "--load-dir")),
                        ("dist", ("torch_dist_to_dcp", "--save-dir", tmp_path / "x", "--load-dir"))):
        release = tmp_path / kind / "release"
        damaged = sorted(release.glob("*.distcp"))[-1]
        flip_a_bit(damaged)
        done = convert(*words, release, expect=None)
        flip_a_bit(damaged)
        assert done.returncode != 0 and len(done.stderr.splitlines()) == 1, (words, done.stderr)
        assert f"{damaged} has the checksum" in done.stderr and "convert another step" in done.stderr
        assert not (tmp_path / "x").exists(), words


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_step_is_replaced_and_no_tracker_set_back(tmp_path):
    steps, tracker = tmp_path / "steps", tmp_path / "dist" / TRACKER
    for iteration in (7, 20):
        dcp.save({"model": {"w": torch.full((3,), float(iteration))}, "iteration": iteration}, no_dist=True,
                 checkpoint_id=steps / f"iter_{iteration:07d}")
    before = contents(steps)
    done = convert("dcp_to_torch_dist", "--load-dir", steps / "iter_0000007", "--save-dir", steps, expect=None)
    assert done.returncode != 0 and "would replace the step" in done.stderr and len(done.stderr.splitlines()) == 1
    assert contents(steps) == before
    convert("dcp_to_torch_dist", "--load-dir", steps / "iter_0000020", "--save-dir", tmp_path / "dist")
    older = ("dcp_to_torch_dist", "--load-dir", steps / "iter_0000007", "--save-dir", tmp_path / "dist")
    done = convert(*older, expect=None)
    assert done.returncode != 0 and "holds a run's steps (iter_0000020)" in done.stderr
    done = convert(*older, "--overwrite")
    assert f"iter_0000020 is newer and stays the step that a run loads; write 7 into {tracker}" in done.stdout
    assert tracker.read_text() == "20"
    small_model(tmp_path / "hf", tie_word_embeddings=False)
    to_release = ("hf_to_torch_dist", "--hf-dir", tmp_path / "hf", "--save-dir", tmp_path / "dist")
    done = convert(*to_release, "--overwrite")
    assert "write release into" in done.stdout and tracker.read_text() == "20"
    done = convert(*to_release, expect=None)
    assert done.returncode != 0 and "holds a run's steps" in done.stderr
    assert sorted(os.listdir(tmp_path / "dist")) == ["iter_0000007", "iter_0000020", tracker.name, "release"]


def test_wrong_use_is_one_message(tmp_path):
    small_model(tmp_path / "hf", tie_word_embeddings=False)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.ones(2).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "iter_0000007").mkdir()
    (tmp_path / "steps" / TRACKER).write_text("7")
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "iter_0000100.bak", no_dist=True)
    for words, part in (
            (("dcp_to_torch_dist", "--load-dir", tmp_path / "iter_0000100.bak", "--save-dir", tmp_path / "x"),
             "is no step by its name"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "none.pt", "--dcp-dir", tmp_path / "x"), "cannot read"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "module.pt", "--dcp-dir", tmp_path / "x"),
             "not a state dict"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "old.pt", "--dcp-dir", tmp_path / "x"),
             "written anew by torch.save"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "sparse.pt", "--dcp-dir", tmp_path / "x"),
             "make it dense"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "good.pt", "--dcp-dir", tmp_path / "hf"),
             "holds weights"),
            (("dcp_to_torch", "--dcp-dir", tmp_path / "steps", "--torch-save-path", tmp_path / "y.pt"),
             "iter_0000007 has no .metadata"),
            (("dcp_to_torch", "--dcp-dir", tmp_path / "none", "--torch-save-path", tmp_path / "y.pt"),
             "there is no directory"),
            (("dcp_to_torch", "--dcp-dir", tmp_path / "iter_0000100.bak", "--torch-save-path", tmp_path / "good.pt"),
             "exists already"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--tie-weight-mapping", "a=b"),
             "has no weight b"),
            (("hf_to_dcp",), "--hf-dir is required"),
            (("hf_to_dcp", "--hf-dir", tmp_path, "--dcp-dir", tmp_path / "x"), "neither model.safetensors nor"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--hf-prefix", "zz"),
             "begins with --hf-prefix"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--tie-weight-mapping", "a"),
             "target=source"),
            (("dcp_to_hf", "--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "y", "--model-assets-dir",
              tmp_path / "hf"), "holds Hugging Face weights"),
            (("hf_to_dpc",), "convert")):
        done = convert(*words, expect=None)
        assert done.returncode != 0 and part in done.stderr and len(done.stderr.splitlines()) == 1, (words, done.stderr)
    left = [name for name in ("x", "y.pt", "y.pt.tmp", ".x.tmp") if (tmp_path / name).exists()]
    assert not left, left
