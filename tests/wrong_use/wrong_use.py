"""Runs the programs with a user's mistakes; shared by test_wrong_*.py."""
import math
import os

import megashard
from megashard import PROGRAM, ROOT, RUN, TRACKER, write_documents


def run(*arguments, **variables):
    return megashard.run(PROGRAM, *arguments, expect=None, timeout=60, cwd=ROOT, env=megashard.environment(**variables))


def only_line(done):
    """The user's output: one line on stderr, no stack."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megashard: error: "), done.stderr
    return lines[0]


def check(case, **places):
    """A case: the words (with {places}), the exit code, and a part of the one message."""
    arguments, code, message = case
    done = run(*[each.format(**places) for each in arguments])
    assert message in only_line(done)
    assert done.returncode == code


NETWORK = megashard.network(layers=1).split()
LOOP = f"--micro-batch-size 1 --global-batch-size 2 --train-iters 2 {RUN}".split()
PRETRAIN = ["pretrain", *NETWORK, *LOOP]
ON_TWO_RANKS = ["launch", "-n", "2", "--", *PRETRAIN]
RATE, MOCK, ALL_TRAINING = ["--lr", "1e-3"], ["--mock-data"], ["--split", "100,0,0"]
FROM_MODEL = ["pretrain", *LOOP, *RATE, *MOCK, "--seq-length", "16", "--hf-model"]
# Beside the steps of the fixture `here`.
TRAIN = [*PRETRAIN, *RATE, *MOCK]
MODEL = ["pretrain", *LOOP, *RATE, "--data-path", "{folder}/good", *ALL_TRAINING, "--seq-length", "16", "--hf-model",
         "{folder}/model", "--from-scratch"]
INFER = ["infer", *NETWORK, "--ckpt-format", "torch_dcp", "--data-path", "{folder}/good"]
CONVERT = ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save"]
SAVED = "{here}/saved"
SAVE = ["--save-interval", "1", "--save"]


def another(flag, value, words=TRAIN):
    """The words with another value of the flag."""
    return [(value if before == flag else each) for before, each in zip(["", *words], words)]


def steps_of(path):
    return sorted(each.name for each in path.iterdir() if each.name != TRACKER)


def run_with_permissions(*arguments):
    """As a user who is limited by permissions, unlike root."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    return megashard.run(*(drop if os.geteuid() == 0 else []), PROGRAM, *arguments, expect=None, cwd=ROOT)


def write_tokens(prefix, token, documents=10):
    """A data set of 40 tokens a document; all documents but one are all `token`."""
    write_documents(prefix, [range(40)] + (documents - 1) * [40 * [token]], code=4)


def write_conversations(prefix, tokens=(3, 50, 50, 4, 1, 2), grid=(1, 2, 4), width=24, learnt=1):
    """A set of two equal conversations: a question with places (50) for a picture of zeros, and an answer, learnt or
    not."""
    from conversation_writer import Pictures, Sample, Writer

    writer = Writer(str(prefix), [], [])
    for _ in range(2):
        writer.add(Sample(tokens, bytes([0, 0, 0, 0, learnt, learnt]),
                          Pictures([grid], bytes(4 * width * math.prod(grid)), width)))
    writer.finish()


VISION = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 50,
    "video_token_id": 51,
    "text_config": {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3,
                    "vocab_size": 60, "num_key_value_heads": 3, "max_position_embeddings": 64,
                    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 2,
                      "out_hidden_size": 24, "window_size": 8, "fullatt_block_indexes": [0]}}
