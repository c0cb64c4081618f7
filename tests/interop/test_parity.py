"""megashard against PyTorch FSDP2, DDP and FSDP1: the same weights and batches, trained by both, compared by step.

fsdp2_reference.py and train_dump read one job file; each test compares one case, with ours on the CPU and on the
simulated device. Where valid implementations of FSDP2 drift apart by themselves (order of additions), the bars are an
order of magnitude above that drift.
"""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megashard import fsdp2_reference, train_dump

MICRO_BATCH, LENGTH, VOCABULARY = 2, 32, 101


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    mesh: tuple
    steps: int = 20
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard: bool | None = None
    wrapper: str = "fsdp2"  # of the reference
    loss_scale: tuple | None = None  # (initial, window, steps that overflow)

    @property
    def world(self):
        return self.mesh[0] * (self.mesh[1] if len(self.mesh) == 2 else 1)

    def __str__(self):
        parts = [self.family, "x".join(map(str, self.mesh)), self.optimizer]
        parts += [self.param_dtype] if self.param_dtype else []
        parts += [f"reshard={self.reshard}"] if self.reshard is not None else []
        parts += [self.wrapper] if self.wrapper != "fsdp2" else []
        return "-".join(parts)


# Dimensions that no world divides: 3 heads of 6, 18 hidden, 37 inner, 101 tokens; one key head has 6 rows, which
# leaves the last of four ranks without any.
FP32 = [
    Case("qwen3", (1,)),
    Case("qwen3", (2,)),
    Case("llama", (3,)),
    Case("qwen3", (4,)),
    Case("qwen3", (2, 2)),
    Case("qwen2", (2,), reshard=False),
    Case("llama_tied", (2,), reshard=True),
    Case("qwen2", (3,), optimizer="sgd", lr=0.05, clip=0.0),
]
BF16 = [
    Case("qwen3", (2,), steps=10, param_dtype="bfloat16", reduce_dtype="float32"),
    Case("llama", (2, 2), steps=10, param_dtype="bfloat16", reduce_dtype="float32"),
]

# The scale doubles after four steps and is halved where a step is skipped.
FP16 = [
    Case("qwen3", (2,), steps=12, param_dtype="float16", reduce_dtype="float32", loss_scale=(4096.0, 4, (6, 9))),
    Case("llama", (3,), steps=10, param_dtype="float16", reduce_dtype="float32", loss_scale=(1024.0, 4, (0, 5))),
    Case("qwen2", (3,), steps=10, optimizer="sgd", lr=0.05, clip=0.0, param_dtype="float16", reduce_dtype="float32",
         loss_scale=(1024.0, 3, (2, 3))),
]

OTHER_WRAPPERS = [Case("qwen3", (2,), wrapper="ddp"), Case("qwen3", (2,), wrapper="fsdp1")]


def make_model(family, folder):
    import transformers

    sizes = dict(vocab_size=VOCABULARY, hidden_size=18, intermediate_size=37, num_hidden_layers=3,
                 num_attention_heads=3, num_key_value_heads=1, head_dim=6, max_position_embeddings=64,
                 initializer_range=0.2, tie_word_embeddings=family.endswith("_tied"), bos_token_id=None,
                 eos_token_id=None)
    base = family.removesuffix("_tied")
    torch.manual_seed(len(family))
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config,
              "qwen3": transformers.Qwen3Config}[base](**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and norms that matter
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def make_batches(case, file):
    """Rows that count up by 1, 2 or 3: something to learn."""
    generator = torch.Generator().manual_seed(case.world)
    rows = (20, case.world * MICRO_BATCH, 1)
    start = torch.randint(0, VOCABULARY, rows, generator=generator)
    stride = torch.randint(1, 4, rows, generator=generator)
    save_file({"tokens": (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY}, file)


def selected_cases(session):
    """The cases of the tests that run, and those that they are compared with; all if a test asks for several."""
    tests = [item for item in session.items if item.path.samefile(__file__)]
    if any("case" not in item.callspec.params for item in tests):
        return FP32 + BF16 + FP16 + OTHER_WRAPPERS
    cases = {item.callspec.params["case"] for item in tests}
    return sorted(cases | {dataclasses.replace(case, wrapper="fsdp2") for case in cases}, key=str)


def make_jobs(folder, cases):
    jobs = {"theirs": [], "ours": []}
    for case in cases:
        model = folder / case.family
        if not model.exists():
            make_model(case.family, model)
        batches = folder / f"batches-{case.world}.safetensors"
        if not batches.exists():
            make_batches(case, batches)
        for side, job in jobs.items():
            if side == "ours" and case.wrapper != "fsdp2":
                continue  # compared with ours of the same case
            fields = {key: value for key, value in dataclasses.asdict(case).items() if key != "loss_scale"}
            if case.loss_scale:
                fields["loss_scale"] = dict(zip(("initial", "window", "overflows"), case.loss_scale))
            job.append(fields | {"model": str(model), "batches": str(batches),
                                 "output": str(folder / f"{case}.{side}.safetensors")})
    for side, job in jobs.items():
        (folder / f"{side}.json").write_text(json.dumps(job))
    return jobs


@pytest.fixture(scope="module")
def trained_by_torch(request, tmp_path_factory):
    """The folder of the jobs and of PyTorch's results, and the cases."""
    folder = tmp_path_factory.mktemp("parity")
    cases = selected_cases(request.session)
    make_jobs(folder, cases)
    fsdp2_reference(folder / "theirs.json")
    return folder, cases


@pytest.fixture(scope="module", params=["cpu", "sim"])
def results(trained_by_torch, request):
    """(theirs, ours) by case."""
    folder, cases = trained_by_torch
    train_dump(folder / "ours.json", request.param)
    loaded = {case: tuple(load_file(folder / f"{case}.{side}.safetensors") for side in ("theirs", "ours"))
              for case in cases if case.wrapper == "fsdp2"}
    for case, (_, ours) in loaded.items():
        with safe_open(folder / f"{case}.ours.safetensors", "pt") as file:
            ours["dtypes"] = file.metadata()
    for case in (case for case in cases if case.wrapper != "fsdp2"):
        theirs = load_file(folder / f"{case}.theirs.safetensors")
        loaded[case] = theirs, loaded[dataclasses.replace(case, wrapper="fsdp2")][1]
    return loaded


def furthest(theirs, ours, key):
    """(relative distance, step) of the step that is furthest off."""
    distance = ((ours[key] - theirs[key]) / theirs[key]).abs()
    return distance.max().item(), distance.argmax().item()


def assert_tensors_close(theirs, ours, prefix, bar):
    names = [name for name in theirs if name.startswith(prefix)]
    assert names and names == [name for name in ours if name.startswith(prefix)]
    for name in names:
        assert ours[name].dtype == torch.float32 and ours[name].shape == theirs[name].shape
        distance = (ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()
        assert distance <= bar, f"{name}: {distance:.2e} of its largest value"


@pytest.mark.parametrize("case", FP32 + OTHER_WRAPPERS, ids=str)
def test_fp32(results, case):
    theirs, ours = results[case]
    assert len(ours["loss"]) == len(theirs["loss"]) == case.steps
    assert theirs["loss"][-1] < theirs["loss"][0]
    assert_tensors_close(theirs, ours, "grad.", 1e-5)
    assert furthest(theirs, ours, "loss") <= (2e-6, case.steps)
    assert furthest(theirs, ours, "grad_norm") <= (1e-4, case.steps)
    assert_tensors_close(theirs, ours, "weight.", 1e-5)


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_parameters_fp32_reduction(results, case):
    theirs, ours = results[case]
    assert furthest(theirs, ours, "loss") <= (1e-3, case.steps)
    assert furthest(theirs, ours, "grad_norm") <= (2e-2, case.steps)
    dtypes = ours["dtypes"]
    assert dtypes["gathered_parameter"] == "bfloat16"
    assert dtypes["reduce_scatter"] == "float32"
    assert dtypes["gradient"] == dtypes["parameter"] == dtypes["optimizer_state"] == "float32"
    assert len(case.mesh) == 1 or dtypes["all_reduce"] == "float32"


@pytest.mark.parametrize("case", FP16, ids=str)
def test_fp16_with_a_loss_scale(results, case):
    """Against torch's GradScaler: same scales, skipped steps and weights."""
    theirs, ours = results[case]
    assert torch.equal(ours["loss_scale"], theirs["loss_scale"])
    initial, _, overflows = case.loss_scale
    changes = torch.cat([torch.tensor([initial]).double(), ours["loss_scale"].double()]).diff()
    assert (changes < 0).nonzero().flatten().tolist() == list(overflows) and (changes > 0).any()
    assert furthest(theirs, ours, "loss") <= (1e-3, case.steps)
    assert furthest(theirs, ours, "grad_norm") <= (2e-2, case.steps)
    dtypes = ours["dtypes"]
    assert dtypes["gathered_parameter"] == "float16"
    assert dtypes["gradient"] == dtypes["parameter"] == dtypes["optimizer_state"] == "float32"


def test_bf16_gathers_half_the_bytes(results):
    fp32, bf16 = (results[case][1]["gathered_bytes_a_step"].item() for case in (Case("qwen3", (2,)), BF16[0]))
    assert 0.5 <= bf16 / fp32 < 0.51  # buffers are padded
