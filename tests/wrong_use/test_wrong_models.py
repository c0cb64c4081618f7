"""Models, Hugging Face directories and conversations that do not fit."""
import pytest

from wrong_use import ALL_TRAINING, FAILURE, FROM_MODEL, LOOP, RATE, check

EXPERT_RANKS = ["--expert-model-parallel-size"]
CASES = {
    "no model folder": ([*FROM_MODEL, "{folder}/none"], FAILURE, "none/config.json: --hf-model must be a Hugging"),
    "a model without weights": ([*FROM_MODEL, "{folder}/model"], FAILURE, "has neither model.safetensors nor"),
    "a flag against config.json": ([*FROM_MODEL, "{folder}/model", "--from-scratch", "--num-layers", "3"], FAILURE,
                                   "--num-layers 3 contradicts the model's config.json, which says 1: leave the flag"),
    "experts that cannot be shared out": (
        ["launch", "-n", "2", "--", *FROM_MODEL, "{folder}/experts", "--from-scratch", *EXPERT_RANKS, "2"], FAILURE,
        "--expert-model-parallel-size 2 does not divide the 3 experts of the model; choose a number that does"),
    "a model without experts": (
        ["launch", "-n", "2", "--", *FROM_MODEL, "{folder}/model", "--from-scratch", *EXPERT_RANKS, "2"], FAILURE,
        "--expert-model-parallel-size 2 needs a model with experts, and this one has none; leave it out"),
}

SEES = ["launch", "-n", "2", "--", "pretrain", "--hf-model", "{folder}/sees", "--from-scratch", "--seq-length", "16", *LOOP, *RATE,
        *ALL_TRAINING, "--data-path"]
CASES |= {
    "a conversation's token beyond the vocabulary": ([*SEES, "{folder}/beyond"], FAILURE,
                                                     'beyond" holds token 60 (in sample'),
    "a picture that the model cannot merge": ([*SEES, "{folder}/uneven"], FAILURE, "image_grid_thw[0] is [1, 3, 4]: all must be"),
    "pictures of another model": ([*SEES, "{folder}/pixels"], FAILURE, "pixel_values [8, 96] must be [8, 24]"),
    "more places than pictures": ([*SEES, "{folder}/places"], FAILURE, "has a place for a further image (token 50) at 4"),
    "a picture larger than its place": ([*SEES, "{folder}/larger"], FAILURE,
                                        "image 0 of image_grid_thw has 4 features, but only 2 tokens 50 stand for it"),
    "a set of pictures that is cut off": ([*SEES, "{folder}/cut"], FAILURE, "cut.vision.safetensors"),
    "heads that two ranks cannot share": ([*SEES, "{folder}/chats", "--context-parallel-size", "2"], FAILURE,
                                          "Qwen2_5_VLForConditionalGeneration has 3 attention heads, which 2 ranks of a sequence"),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_sentence(folder, name):
    check(CASES[name], folder=folder)
