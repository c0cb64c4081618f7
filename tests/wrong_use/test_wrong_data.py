"""Data that is missing, damaged or of another model, and losses that are no numbers."""
import pytest

from wrong_use import ALL_TRAINING, FAILURE, MOCK, PRETRAIN, RATE, USAGE, check

CASES = {
    "no data": ([*PRETRAIN, *RATE], USAGE, "give --data-path PREFIX of .bin/.idx files, or --mock-data"),
    "no such data": ([*PRETRAIN, *RATE, "--data-path", "{folder}/none"], FAILURE, "there is no file"),
    "tokens beyond the vocabulary": ([*PRETRAIN, *RATE, *ALL_TRAINING, "--data-path", "{folder}/large"], FAILURE,
                                     "tokenise the text with the model's own tokenizer"),
    "an empty split": ([*PRETRAIN, *RATE, "--data-path", "{folder}/good", "--split", "0,100,0"], FAILURE,
                       "there is no training data: --split gives the train split a weight of 0"),
    "a corrupt index": ([*PRETRAIN, *RATE, *ALL_TRAINING, "--data-path", "{folder}/short"], FAILURE,
                        "short.idx is truncated or corrupt"),
    "a loss that is no number": ([*PRETRAIN, *MOCK, "--lr", "1e30"], FAILURE, "lower the learning rate"),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_sentence(folder, name):
    check(CASES[name], folder=folder)
