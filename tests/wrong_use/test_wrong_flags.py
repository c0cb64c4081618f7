"""Wrong flags, YAML files and sizes end in one sentence that says what to do, and in exit code 2."""
import pytest

from wrong_use import FROM_MODEL, MOCK, ON_TWO_RANKS, PRETRAIN, RATE, USAGE, check

EXPERT_RANKS = ["--expert-model-parallel-size"]
ROLL = ["pretrain", "--config", "{folder}/roll.yaml", *MOCK, "--role"]
# {folder} stands for the fixture's.
CASES = {
    "a misspelt flag": ([*PRETRAIN, *MOCK, *RATE, "--weigth-decay", "0"], USAGE, "did you mean --weight-decay?"),
    "a flag that is refused": ([*PRETRAIN, *MOCK, *RATE, "--use-distributed-optimizer"], USAGE,
                               "FSDP2 shards the optimizer's state already"),
    "no FSDP2 file": ([*PRETRAIN, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/none.yaml"], USAGE,
                      "none.yaml cannot be read: there is no such file."),
    "bad YAML": ([*PRETRAIN, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/bad.yaml"], USAGE,
                 "bad.yaml:2: this is not YAML"),
    "ranks that cannot be divided": ([*ON_TWO_RANKS, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/thirds.yaml"],
                                     USAGE, "World size 2 must be divisible by sharding_size 3; change sharding_size"),
    "experts and ranks that do not fit": (
        ["launch", "-n", "4", "--", *FROM_MODEL, "{folder}/experts", "--from-scratch", *EXPERT_RANKS, "3"], USAGE,
        "world size 4 is not divisible by --expert-model-parallel-size 3; change one of them"),
    "a misspelt key of the FSDP2 file": (
        [*PRETRAIN, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/misspelt.yaml", "--fsdp2-config-strict"], USAGE,
        'misspelt.yaml:2: unknown key "parm_dtype"; did you mean param_dtype?'),
    "a misspelt key of the arguments": (["pretrain", "{folder}/arguments.yaml"], USAGE,
                                        'arguments.yaml:2: unknown key "num_layer"; did you mean num_layers?'),
    "a misspelt key of ROLL's": ([*ROLL, "actor"], USAGE,
                                 "unknown key actor.strategy_args.strategy_config.fsdp_siz; did you mean fsdp_size?"),
    "experts of ROLL that do not fit": (["launch", "-n", "2", "--", *ROLL, "student"], USAGE,
                                        "leaves 1 with the same experts; efsdp_size, which is 2, must divide that"),
    "devices that are not there": (["launch", "-n", "2", "--", *ROLL, "large"], USAGE,
                                   "large.device_mapping is for 16 devices, but the run has 2 ranks; start as many"),
    "a role that is not there": ([*ROLL, "critic"], USAGE, "has no such worker; it has actor, student, large."),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_sentence(folder, name):
    check(CASES[name], folder=folder)
