"""`megashard generate`: its own flags and its prompts, each got wrong."""
import pytest
import torch
from safetensors.torch import load_file, save_file

from megashard import FAILURE, USAGE
from test_wrong_infer import SHAPES
from wrong_use import check, run, write_conversations, write_tokens


def generate(*words, data="long", length="44", tokens="5", output="{folder}/answers"):
    given = {"--data-path": data and f"{{folder}}/{data}", "--seq-length": length, "--max-new-tokens": tokens,
             "--output": output}
    return ["generate", "--hf-model", "{folder}",
            *[word for flag, value in given.items() if value for word in (flag, value)], *words]


CASES = {
    "no output": (generate(output=None), USAGE, "give --output PREFIX, where the answers go."),
    "no number of tokens": (generate(tokens=None), USAGE, "give --max-new-tokens N, the longest answer."),
    "no tokens": (generate(tokens="0"), USAGE, '--max-new-tokens takes a number of tokens, got "0".'),
    "half a token": (generate(tokens="2.5"), USAGE, '--max-new-tokens takes a number of tokens, got "2.5".'),
    "a temperature below zero": (generate("--temperature", "-1"), USAGE,
                                 '--temperature takes a number from 0 on, got "-1".'),
    "an infinite temperature": (generate("--temperature", "inf"), USAGE,
                                '--temperature takes a number from 0 on, got "inf".'),
    "a temperature in words": (generate("--temperature", "warm"), USAGE,
                               '--temperature takes a number from 0 on, got "warm".'),
    "a share of nothing": (generate("--top-p", "0"), USAGE, '--top-p takes a number above 0, up to 1, got "0".'),
    "a share above all": (generate("--top-p", "1.5"), USAGE, '--top-p takes a number above 0, up to 1, got "1.5".'),
    "vLLM's number for all tokens": (generate("--top-k", "-1"), USAGE,
                                     '--top-k takes a number of tokens, or 0 for all, got "-1".'),
    "no samples": (generate("--samples-per-prompt", "0"), USAGE,
                   '--samples-per-prompt takes a number of answers, got "0".'),
    "equal samples": (generate("--temperature", "0", "--samples-per-prompt", "4"), USAGE,
                      "--temperature 0 gives all 4 samples of a prompt the same answer; leave out "
                      "--samples-per-prompt."),
    "a stop word": (generate("--stop-token-ids", "7,END"), USAGE,
                    '--stop-token-ids takes token ids with commas between them, got "END".'),
    "a stop token below zero": (generate("--stop-token-ids", "-7"), USAGE, 'got "-7".'),
    "a stop token of another model": (generate("--stop-token-ids", "7,64"), USAGE,
                                      "--stop-token-ids has the token 64, but the model's vocabulary has 64"),
    "no room for an answer": (generate(length="43"), FAILURE,
                              "prompt 0 has 40 tokens, and with --max-new-tokens 5 more it is longer than --seq-length "
                              "and one: give --seq-length 44"),
    "pictures": (generate(data="pictures"), USAGE, "has pictures, which generate does not write to its set; give"),
    "an answer alone": (generate(data="alone"), FAILURE, "conversation 0 of"),
    "a file in the way": (generate(output="{folder}/text.txt/answers"), USAGE, "cannot be written"),
    "no data": (generate(data=None), USAGE, "inference reads one data set; give --data-path PREFIX"),
    "infer's flag": (generate("--generate", "3"), USAGE, "unknown flag --generate"),
    "generate's flag for infer": (["infer", *generate(output=None)[1:], "--log-probs", "{folder}/out.npy"], USAGE,
                                  "unknown flag --max-new-tokens; `megashard generate` has it"),
}


@pytest.fixture(scope="module")
def sets(folder, tmp_path_factory):
    """The model of the others with weights, and prompts."""
    places = tmp_path_factory.mktemp("generate")
    (places / "config.json").write_text((folder / "model" / "config.json").read_text())
    torch.manual_seed(0)
    save_file({name: torch.randn(sizes) * 0.02 for name, sizes in SHAPES.items()}, places / "model.safetensors")
    (places / "text.txt").write_text("In the beginning")
    write_tokens(places / "long", 1)
    write_conversations(places / "pictures")
    one = load_file(places / "pictures.vision.safetensors")
    text = {name: one[name] for name in ("tokens", "loss_mask", "sample_ends")}
    save_file(text | {"loss_mask": text["loss_mask"].fill_(1)}, places / "alone.vision.safetensors")
    return places


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_message(sets, name):
    check(CASES[name], folder=sets)


def test_help_needs_neither_model_nor_data():
    said = run("generate", "--help").stdout
    assert "Samples answers to prompts" in said and "--samples-per-prompt INT" in said
