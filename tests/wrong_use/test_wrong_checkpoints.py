"""Checkpoints to load or to write that are damaged, missing or of another run."""
import os
import shutil

from wrong_use import FAILURE, MOCK, PRETRAIN, RATE, USAGE, only_line, run


def test_a_damaged_checkpoint(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "damaged")
    (rank_file,) = (tmp_path / "damaged" / "iter_0000002").glob("*.distcp")
    os.truncate(rank_file, 500)
    done = run(*PRETRAIN, *RATE, *MOCK, "--load", str(tmp_path / "damaged"))
    assert "__0_0.distcp has 500 bytes" in only_line(done) and "put back what is damaged from a copy" in done.stderr
    assert done.returncode == FAILURE


def test_another_models_checkpoint(saved):
    wider = [("32" if before == "--hidden-size" else each) for before, each in zip(["", *PRETRAIN], PRETRAIN)]
    done = run(*wider, *RATE, *MOCK, "--load", str(saved))
    assert "has hidden_size 16, and this run has 32: give --hidden-size 16, or --use-checkpoint-args" in only_line(done)
    assert done.returncode == USAGE
