"""Files of vision-language models are written again as they were, bit for bit: by converters, and by --save-hf."""
import pytest
import torch
from safetensors.torch import load_file

from megashard import convert, pretrain
from tiny_vision import (ASKED, asked, make_glm4v, make_internvl, make_internvl_chat, make_kimi_k25, make_step3, said,
                         write_conversations)


@pytest.mark.parametrize("make", [make_internvl, make_internvl_chat, make_glm4v, make_kimi_k25, make_step3])
def test_checkpoints_have_the_published_files(tmp_path, make):
    folder = tmp_path / "hf"
    folder.mkdir()
    make(folder)
    convert("hf_to_dcp", "--hf-dir", folder, "--dcp-dir", tmp_path / "dcp")
    convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", tmp_path / "back",
            "--model-assets-dir", folder)
    write_conversations(folder, [[ASKED, said("sat on the mat")], [asked("on"), said("the cat")]] * 2, tmp_path / "set")
    flags = ["--hf-model", folder, "--data-path", tmp_path / "set", "--split", "1,0,0", "--seq-length", 128,
             "--micro-batch-size", 1, "--global-batch-size", 2, "--train-iters", 1, "--lr", 0, "--eval-iters", 0,
             "--save-hf", tmp_path / "saved", "--use-torch-fsdp2"]
    if make in (make_internvl_chat, make_glm4v, make_kimi_k25):
        flags += ["--expert-model-parallel-size", 2]
    pretrain(tmp_path, *flags, ranks=2, config=None, defaults="")
    wanted = load_file(folder / "model.safetensors")
    for written in ("back", "saved"):
        got = load_file(tmp_path / written / "model.safetensors")
        assert sorted(got) == sorted(wanted)
        assert all(torch.equal(got[name], value) for name, value in wanted.items()), written
