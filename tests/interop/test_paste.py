"""Upstream's own scripts and configurations, pasted: each runs, or is refused for the reasons of its page."""
import re

import pytest

from upstream_models import Workshop
from upstream_runs import is_here, run_entry, title, upstream_list
from upstream_table import PAGE, line_of, lines_of_page, written

LISTED = upstream_list()
ENTRIES = {title(entry): entry for entry in LISTED["entries"]}
# One of each kind that runs, and of each that is refused.
SAMPLE = ["examples/qwen2.5vl/finetune_qwen2_5_vl_72b_fsdp.sh", "examples/qwen3vl/finetune_lora_qwen3vl_30B.sh",
          "examples/qwen3vl/finetune_qwen3vl_30B_v1_A5.sh", "examples/qwen3_5/finetune_qwen3_5_397B.sh",
          "examples/qwen3_6/finetune_qwen3_6_27B.sh", "examples/mcore/qwen3_5/qwen3_5_35B_config.yaml",
          "examples/qwen3.5-35BA3-sft_fsdp2/sft_config_ep.yaml (sft_train)",
          "examples/wan2.1/14b/t2v/pretrain_fsdp2.sh", "examples/bagel/finetune_bagel.sh",
          "examples/magistral-2509/finetune_magistral_2509.sh",
          "examples/qwen3-30BA3B-agentic_fsdp2/agentic_val_sokoban_30a3.yaml (actor_train)",
          "torchtitan/models/llama3/config_registry.py:llama3_8b"]


@pytest.fixture(scope="module")
def workshop(folder):
    return Workshop(folder / "made")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_file_does_what_the_page_says(folder, workshop, name):
    entry = ENTRIES[name]
    result, reasons, out = run_entry(entry, folder / re.sub(r"\W", "_", name), workshop)
    if is_here(entry):
        assert line_of(name, result, reasons) == lines_of_page(PAGE.read_text())[entry["repository"]][name], out[-3000:]
        assert ("its loss is --objective policy" in out) == (entry.get("role") == "actor_train")
    else:
        assert result == "refused" and "no model that this program has" in " ".join(reasons), out[-3000:]


def test_the_page_has_every_entry():
    lines = lines_of_page(PAGE.read_text())
    assert written(LISTED, lines) == PAGE.read_text()


def test_what_a_file_freezes_is_frozen(folder, workshop):
    """The parameters that upstream's own model would train, by their number."""
    import json

    from transformers import Qwen3VLForConditionalGeneration

    name = "examples/qwen3vl/finetune_qwen3vl_8B.sh"
    _, _, out = run_entry(ENTRIES[name], folder / "frozen", workshop)
    model = Qwen3VLForConditionalGeneration.from_pretrained(workshop.model("qwen3_vl"))
    marks = ("visual.patch_embed", "visual.blocks", "visual.pos_embed", "visual.merger")
    frozen = sum(each.numel() for key, each in model.named_parameters() if any(mark in key for mark in marks))
    assert 0 < frozen and f"frozen: {frozen} elements of model.visual.patch_embed" in out
    steps = (folder / "frozen" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2 and all(json.loads(step)["grad_norm"] > 0 for step in steps)
