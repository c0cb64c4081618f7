"""Data that is missing, damaged, too little or of another model, and losses that are no numbers."""
import shutil
import struct

import pytest

from megashard import FAILURE, USAGE, write_documents
from wrong_use import ALL_TRAINING, MOCK, PRETRAIN, RATE, check, run, write_tokens

DATA = [*PRETRAIN, *RATE, "--data-path"]


def changed(**values):
    """DATA's flags with other values."""
    flags = {"--" + name.replace("_", "-"): value for name, value in values.items()}
    return [flags.get(before, word) for before, word in zip(["", *PRETRAIN], PRETRAIN)] + RATE


EVALUATED = changed(eval_iters="1")
BETTER = ("give --split 98,1,1, which leaves each split some, or --split 100,0,0 to train on all of them and evaluate "
          "on none")
CASES = {
    "no data": ([*PRETRAIN, *RATE], USAGE, "give --data-path PREFIX of .bin/.idx files, or --mock-data"),
    "no such data": ([*DATA, "{sets}/none"], USAGE,
                     "there is no file {sets}/none.idx; give the common prefix of a .bin and a .idx file"),
    "tokens beyond the vocabulary": ([*DATA, "{folder}/large", *ALL_TRAINING], FAILURE,
                                     "tokenise the text with the model's own tokenizer"),
    "tokens below zero": ([*DATA, "{sets}/negative", *ALL_TRAINING], FAILURE, "holds token -3"),
    "an empty split": ([*DATA, "{folder}/good", "--split", "0,100,0"], USAGE,
                       "--split 0,100,0 gives the train split a weight of 0; give it a share, as in --split 100,0,0"),
    "a corrupt index": ([*DATA, "{folder}/short", *ALL_TRAINING], FAILURE, "short.idx is truncated or corrupt"),
    "a loss that is no number": ([*PRETRAIN, *MOCK, "--lr", "1e30"], FAILURE, "lower the learning rate"),
    "the sample of such a loss": ([*PRETRAIN, *MOCK, "--lr", "1e30"], FAILURE,
                                  "at iteration 2, in micro batch 1 of 2 (sample 2 of "),
    "rollouts and data": ([*DATA, "{folder}/good", "--rollouts", "{folder}/none", "--objective", "policy"], USAGE,
                          "and --rollouts exclude each"),
    "rollouts for so many samples": ([*["--train-samples" if word == "--train-iters" else word for word in PRETRAIN],
                                      *RATE, "--rollouts", "{folder}/none", "--objective", "policy"], USAGE,
                                     "--rollouts decides how many answers a step has; give --train-iters"),
    "weights for nobody's model": ([*PRETRAIN, *MOCK, *RATE, "--publish-weights", "{folder}/out"], USAGE,
                                   "--publish-weights needs --hf-model"),
    "a loss of latents, and a model of tokens": ([*PRETRAIN, *MOCK, *RATE, "--objective", "flow-matching"], USAGE,
                                                 "--objective flow-matching is a loss of latents"),
    "captions, and a model of tokens": ([*PRETRAIN, *MOCK, *RATE, "--caption-dropout-rate", "0.1"], USAGE,
                                        "--caption-dropout-rate is for a model of latents"),
    "an interval without weights": ([*PRETRAIN, *MOCK, *RATE, "--publish-interval", "2"], USAGE,
                                    "--publish-interval needs --publish-weights"),
    # too little
    "the default split of a small set": ([*EVALUATED, "--data-path", "{sets}/small"], USAGE,
                                         '--split 969,30,1 leaves the test split no document of "{sets}/small", which '
                                         'has 76; ' + BETTER),
    "the default split of one document": ([*EVALUATED, "--data-path", "{sets}/one"], USAGE,
                                          "which has 1; give --split 100,0,0"),
    "a split that leaves training nothing": ([*DATA, "{sets}/one", "--split", "1,99,0"], USAGE,
                                             'leaves the train split no document of "{sets}/one", which has 1'),
    "a blend with one that is too small": ([*EVALUATED, "--data-path", "1", "{folder}/good", "1", "{sets}/one",
                                            "--split", "80,10,10"],
                                           USAGE,
                                           '--split 80,10,10 leaves the valid split no document of "{sets}/one"'),
    "the default split of two conversations": ([*EVALUATED, "--data-path", "{folder}/chats"], USAGE,
                                               'leaves the valid split no document of "{folder}/chats", which has 2'),
    "documents without tokens": ([*DATA, "{sets}/hollow", *ALL_TRAINING], FAILURE,
                                 "has 0 tokens in its 3 documents; give the split more documents by --split, or leave "
                                 "the set out"),
    "a blend with an empty set": ([*DATA, "1", "{folder}/good", "1", "{sets}/hollow", *ALL_TRAINING], FAILURE,
                                  '"{sets}/hollow" has 0 tokens in its 3 documents'),
    "fewer tokens than a sequence": ([*changed(seq_length="64", max_position_embeddings="64"), "--data-path",
                                      "{sets}/one", "{folder}/good", *ALL_TRAINING], USAGE,
                                     "has 40 tokens in its 1 documents, and a sample takes --seq-length + 1 = 65; "
                                     "give --seq-length 39"),
    "an empty set": ([*DATA, "{sets}/nothing"], FAILURE,
                     "holds no sequence at all; tokenise a file with some text in it"),
    # prefixes
    "a prefix with .bin": ([*DATA, "{folder}/good.bin"], USAGE, "give the prefix without .bin: {folder}/good"),
    "a prefix with .idx": ([*DATA, "{folder}/good.idx"], USAGE, "give the prefix without .idx: {folder}/good"),
    "a prefix with all of its end": ([*DATA, "{folder}/chats.vision.safetensors"], USAGE,
                                     "give the prefix without .vision.safetensors: {folder}/chats"),
    "a prefix without its end": ([*DATA, "{sets}/text"], USAGE, "give the whole prefix, {sets}/text_text_document"),
    "a folder of sets": ([*DATA, "{sets}"], USAGE,
                         "it is a folder; give the prefix of a .bin and a .idx file in it, such as {sets}/"),
    "a folder without sets": ([*DATA, "{sets}/folder"], USAGE, "in it, which preprocess_data.py writes"),
    "JSON lines": ([*DATA, "{sets}/raw.jsonl"], USAGE,
                   "preprocess_data.py --input {sets}/raw.jsonl --output-prefix {sets}/raw --tokenizer-model "
                   "MODEL_DIR`, then give the "
                   "prefix {sets}/raw_text_document"),
    "JSON lines without their end": ([*DATA, "{sets}/raw"], USAGE,
                                     '"{sets}/raw.jsonl" is text, and training reads tokens'),
    "plain text": ([*DATA, "{sets}/book.txt"], USAGE, "--input {sets}/book.txt --input-format text"),
    "text for evaluation": ([*EVALUATED, "--train-data-path", "{folder}/good", "--valid-data-path", "{sets}/raw.jsonl"],
                            USAGE, '"{sets}/raw.jsonl" is text'),
    # files
    "an index alone": ([*DATA, "{sets}/index"], USAGE,
                       "there is no file {sets}/index.bin beside {sets}/index.idx; copy it too"),
    "tokens alone": ([*DATA, "{sets}/tokens"], USAGE,
                     "there is no file {sets}/tokens.idx beside {sets}/tokens.bin; copy it too"),
    "files that are swapped": ([*DATA, "{sets}/swapped"], FAILURE,
                               "swapped.bin is an index: the two files of the set are swapped"),
    "an empty .bin": ([*DATA, "{sets}/no_bytes"], FAILURE,
                      "no_bytes.bin, which has 0 bytes: one of the two is truncated"),
    "an empty .idx": ([*DATA, "{sets}/no_index"], FAILURE, "no_index.idx is truncated: 0 bytes"),
    "an index that was not fetched": ([*DATA, "{sets}/pointer"], FAILURE, "pointer.idx is a Git LFS pointer"),
    "tokens that were not fetched": ([*DATA, "{sets}/pointed"], FAILURE,
                                     "pointed.bin is a Git LFS pointer, not the file itself"),
    "text that is called an index": ([*DATA, "{sets}/called"], FAILURE, "called.idx is not a Megatron index"),
    "an index of other tokens": ([*DATA, "{sets}/narrow"], FAILURE,
                                 "says that a token has 2 bytes, and {sets}/narrow.bin has 4 for each"),
    "a length below zero": ([*DATA, "{sets}/below"], FAILURE, "(-5 tokens of 4 bytes from byte 0) lies outside"),
    "a length beyond the file": ([*DATA, "{sets}/beyond"], FAILURE,
                                 "(2147483647 tokens of 4 bytes from byte 0) lies outside"),
    "numbers with a point": ([*DATA, "{sets}/floats", *ALL_TRAINING], FAILURE,
                             "stores floating-point values (dtype code 7)"),
    "an unknown kind of tokens": ([*DATA, "{sets}/kind"], FAILURE, "has unknown dtype code 99 (1 to 8 exist)"),
    # blends and splits
    "weights for some": ([*DATA, "1", "{folder}/good", "{sets}/one", "{folder}/good"], USAGE,
                         "has weights for 1 of 2 data sets"),
    "a weight of nothing": ([*DATA, "0", "{folder}/good", "1", "{sets}/one"], USAGE,
                            "is not positive; leave a data set out instead"),
    "a weight below zero": ([*DATA, "-1", "{folder}/good", "1", "{sets}/one"], USAGE, "the weight -1 of data set"),
    "a weight at the end": ([*DATA, "1", "{folder}/good", "1"], USAGE, "if it is a weight, a data set must follow it"),
    "a blend with commas": ([*DATA, "0.5,{folder}/good,0.5,{sets}/one"], USAGE, "divided by spaces, not by commas"),
    "a blend with a set that is missing": ([*DATA, "1", "{folder}/good", "1", "{sets}/none"], USAGE,
                                           "there is no file {sets}/none.idx"),
    "positions of documents beside conversations": ([*changed(micro_batch_size="2", global_batch_size="2"),
                                                     "--reset-position-ids", "--data-path", "1", "{folder}/chats", "1",
                                                     "{folder}/good", *ALL_TRAINING], FAILURE,
                                                    "leave them out, or give --micro-batch-size 1"),
    "packing of documents": ([*DATA, "{folder}/good", "--neat-packing", *ALL_TRAINING], USAGE,
                             "the train data are documents, which fill their samples anyway; leave it out"),
    "a split in words": ([*DATA, "{folder}/good", "--split", "a,b"], USAGE, '--split "a,b" is not a list of weights'),
    "a split below zero": ([*DATA, "{folder}/good", "--split=-1,1,1"], USAGE,
                           "is not a list of weights; give three numbers"),
    "a split of four": ([*DATA, "{folder}/good", "--split", "1,2,3,4"], USAGE, "has 4 weights; there are three splits"),
    "a split of nothing": ([*DATA, "{folder}/good", "--split", "0,0,0"], USAGE, "at least one weight must be positive"),
    "a split of what is split": ([*PRETRAIN, *RATE, "--train-data-path", "{folder}/good", "--split", "1,1,1"], USAGE,
                                 "which are split already; leave it out"),
    "evaluation data alone": ([*PRETRAIN, *RATE, "--valid-data-path", "{folder}/good"], USAGE,
                              "--train-data-path is missing; give it"),
    "two sources": ([*DATA, "{folder}/good", *MOCK], USAGE, "exclude each other; give one source of data"),
    "a file of words that is missing": ([*PRETRAIN, *RATE, "--data-args-path", "{sets}/none"], USAGE,
                                        "none cannot be read: there is no such file."),
    "a file without words": ([*PRETRAIN, *RATE, "--data-args-path", "{sets}/empty.txt"], USAGE,
                             "empty.txt is empty; is it the right file?"),
    "pictures for a model without eyes": ([*DATA, "{folder}/chats", *ALL_TRAINING], FAILURE,
                                          "train a vision-language model, or give text"),
}


@pytest.fixture(scope="session")
def sets(folder, tmp_path_factory):
    """Sets to get wrong; numbers of an .idx: its code of dtype is byte 17, the first length follows byte 34."""
    path = tmp_path_factory.mktemp("sets")
    write_tokens(path / "small", 1, documents=76)
    write_tokens(path / "one", 1, documents=1)
    write_tokens(path / "negative", -3)
    write_tokens(path / "text_text_document", 1)
    index, tokens = (folder / "good.idx").read_bytes(), (folder / "good.bin").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"

    def changed(at, value):
        return index[:at] + value + index[at + len(value):]
    pairs = {"swapped": (tokens, index), "no_bytes": (index, b""), "no_index": (b"", tokens),
             "pointer": (pointer, tokens), "pointed": (index, pointer),
             "called": (b"the cat sat on the mat, and so did the dog", tokens),
             "narrow": (changed(17, b"\x08"), tokens), "below": (changed(34, struct.pack("<i", -5)), tokens),
             "beyond": (changed(34, struct.pack("<i", 2**31 - 1)), tokens), "floats": (changed(17, b"\x07"), tokens),
             "kind": (changed(17, b"\x63"), tokens)}
    for name, (idx, bin_) in pairs.items():
        (path / f"{name}.idx").write_bytes(idx)
        (path / f"{name}.bin").write_bytes(bin_)
    write_documents(path / "hollow", 3 * [[]], code=4)
    write_documents(path / "nothing", [], code=4)
    shutil.copy(folder / "good.idx", path / "index.idx")
    shutil.copy(folder / "good.bin", path / "tokens.bin")
    (path / "folder").mkdir()
    (path / "raw.jsonl").write_text('{"text": "the cat"}\n')
    (path / "book.txt").write_text("the cat\n")
    (path / "empty.txt").write_text("")
    return path


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_message(folder, sets, name):
    words, code, message = CASES[name]
    check((words, code, message.format(folder=folder, sets=sets)), folder=folder, sets=sets)


@pytest.mark.parametrize("way", [[*EVALUATED, "--split", "98,1,1"], [*EVALUATED, "--split", "100,0,0"],
                                 changed(eval_iters="0")],
                         ids=["a better split", "all for training", "no evaluation"])
def test_one_flag_lets_a_small_set_go_on(sets, way):
    done = run(*way, "--data-path", sets / "small")
    assert done.returncode == 0, done.stderr
