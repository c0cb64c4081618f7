"""`megashard plan`: its peak beside PyTorch's FSDP2 at 7 B, and its bytes beside those of runs with memory.

docs/benchmarks.md (Bytes of a step) and docs/plan.md have the figures: pytest -s prints them.
"""
import dataclasses
import json
import pathlib
import re
import sys

import pytest

from megashard import INTEROP, LAYERS, NO_DROPOUT, PROGRAM, ROOT, pretrain, run

MIXED = LAYERS + "param_dtype: bf16\nreduce_dtype: fp32\n"
KEPT = "reshard_after_forward: false\n"
STATE = 12  # bytes of a parameter's fp32 row, and of its two moments


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    bias: bool = False  # of queries, keys and values

    @property
    def keys(self):
        return self.hidden // self.heads * self.groups

    @property
    def unit(self):
        """Parameters of a layer."""
        h, kv = self.hidden, self.keys
        return 2 * h * h + 2 * h * kv + 3 * h * self.ffn + 2 * h + self.bias * (h + 2 * kv)

    @property
    def root(self):
        return (2 * self.vocabulary + 1) * self.hidden

    def flags(self, length):
        sizes = {"num-layers": self.layers, "hidden-size": self.hidden, "ffn-hidden-size": self.ffn,
                 "num-attention-heads": self.heads, "num-query-groups": self.groups, "seq-length": length,
                 "max-position-embeddings": length, "vocab-size": self.vocabulary - 1}
        return [*(word for name, value in sizes.items() for word in (f"--{name}", value)), *LLAMA,
                *(["--add-qkv-bias"] if self.bias else [])]


LLAMA = ("--group-query-attention --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --swiglu --lr 1e-4 "
         "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --use-torch-fsdp2 "
         "--untie-embeddings-and-output-weights").split() + NO_DROPOUT
LLAMA_7B = Model(layers=32, hidden=4096, ffn=11008, heads=32, groups=32, vocabulary=32000)
QWEN_7B = Model(layers=28, hidden=3584, ffn=18944, heads=28, groups=4, vocabulary=152064, bias=True)
LLAMA_70B = Model(layers=80, hidden=8192, ffn=28672, heads=64, groups=8, vocabulary=128256)
SMALL = Model(layers=4, hidden=64, ffn=172, heads=4, groups=4, vocabulary=1000)


def plan(folder, model, world, *flags, length=4096, micro_batch=1, batches=1, config=MIXED, **options):
    (folder / "plan.yaml").write_text(config)
    return run(PROGRAM, "plan", "--world-size", world, *model.flags(length), "--micro-batch-size", micro_batch,
               "--global-batch-size", world * micro_batch * batches, "--fsdp2-config-path", folder / "plan.yaml",
               *flags, **options).stdout


def peak_of(text):
    return int(re.search(r"peak memory of rank 0: .* \((\d+) bytes\) of", text)[1])


def seconds_of(text, what="step"):
    """Seconds of the step, or of its "exposed" communication."""
    return float(re.search(rf"^{what}: ([\d.]+) ms", text, re.M)[1]) / 1e3


# --- beside PyTorch's FSDP2 ---

def kept_of_layer(model):
    """Bytes a token that PyTorch's eager Llama or Qwen2 of transformers keeps of a layer for backward, in bf16.

    Two norms: the input in fp32 (4 h), the normed one in bf16 before and after the weight (2 h + 2 h). Attention:
    turned queries and keys, values, the output, and a sum of exponentials a head in fp32. MLP: gate, up, SiLU of gate,
    and the product."""
    h = model.hidden
    return 2 * 8 * h + 2 * (2 * h + 2 * model.keys) + 4 * model.heads + 4 * 2 * model.ffn


def peak_of_fsdp2(model, world, tokens):
    """What rank 0 holds at least when most is held, with a unit a layer: fully_shard, reshard_after_forward, AdamW in
    fp32, param_dtype bf16, reduce_dtype fp32; without what allocators and cuBLAS waste."""
    parameters = model.layers * model.unit + model.root
    held = STATE * parameters / world          # rows and moments
    held += 2 * model.root                     # the root stays gathered from its forward to the end of backward
    held += tokens * (model.layers * kept_of_layer(model) + 8 * model.hidden)  # and the last norm's
    # In the loss: logits in bf16 and in fp32, and their log-softmax. In the last layer's backward: the head's
    # gradient, that layer's weights, and what the next one is gathered into.
    loss = tokens * (2 + 4 + 4) * model.vocabulary
    backward = 2 * model.vocabulary * model.hidden + 2 * 2 * model.unit
    return held + max(loss, backward)


# World, micro batch of 4,096 tokens a sequence: the share of PyTorch's peak that ours may have. The bar is 0.75; where
# less was reached it is that and 2%.
BARS = {(QWEN_7B, 8, 1): 0.66, (QWEN_7B, 8, 2): 0.57, (QWEN_7B, 64, 1): 0.56, (LLAMA_7B, 8, 1): 0.75,
        (LLAMA_7B, 8, 2): 0.67, (LLAMA_7B, 64, 1): 0.65}


@pytest.mark.parametrize("model, world, micro_batch", BARS, ids=lambda each: getattr(each, "vocabulary", each))
def test_a_step_of_7b_holds_less_than_fsdp2(folder, model, world, micro_batch):
    ours = peak_of(plan(folder, model, world, micro_batch=micro_batch))
    theirs = peak_of_fsdp2(model, world, 4096 * micro_batch)
    print(f"\nvocabulary {model.vocabulary}, {world} ranks, {micro_batch} x 4096: {ours / 1e9:.2f} of "
          f"{theirs / 1e9:.2f} GB, {ours / theirs:.3f}")
    assert ours <= BARS[model, world, micro_batch] * theirs
    # Rows and moments, and half of what is kept at the least: it is a plan of this model.
    assert ours > STATE * (model.layers * model.unit + model.root) / world + 4096 * micro_batch * model.layers * (
        kept_of_layer(model) / 2)


# Logits of transformers' loss, by the count of live_memory.so, which takes over the allocator of a process.
LOSS = """
import ctypes, sys, torch, transformers
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=20000, num_attention_heads=1))
model.to(torch.bfloat16)
ids = torch.zeros(1, 64, dtype=torch.long)
memory = ctypes.CDLL(sys.argv[1])
memory.live_memory_peak.restype = ctypes.c_int64
memory.live_memory_start()
model(ids, labels=ids)
print(memory.live_memory_peak() / ids.numel() / 20000)
"""


def test_pytorch_holds_three_copies_of_the_logits():
    of_logit = float(run(sys.executable, "-c", LOSS, INTEROP / "live_memory.so").stdout)
    assert 2 + 4 + 4 <= of_logit <= 10.2  # the rest is the layer's


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_pytorch_keeps_what_the_formula_says(family):
    import torch
    import transformers

    model = Model(layers=2, hidden=64, ffn=172, heads=4, groups=2, vocabulary=50, bias=family == "Qwen2")
    config = getattr(transformers, family + "Config")(
        hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=model.layers, vocab_size=50,
        num_attention_heads=model.heads, num_key_value_heads=model.groups)
    layers = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model
    tokens = 64
    states = torch.randn(1, tokens, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    angles = layers.rotary_emb(states, torch.arange(tokens)[None])
    tensors = [*layers.parameters(), *layers.buffers(), states, *angles]
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers.layers:
            states = layer(states, position_embeddings=angles)
        states.sum()
    of_layer = sum(kept.values()) / tokens / model.layers
    # A norm's 1 / rms is 4 bytes a token, the seeds of dropout are some more.
    assert kept_of_layer(model) <= of_layer <= 1.01 * kept_of_layer(model) + 16


# --- beside runs with memory ---

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
RUNS = {"fp32": (LAYERS, []), "bf16": (MIXED, []), "recompute": (MIXED, RECOMPUTE),
        "kept": (MIXED + KEPT, []),
        "replicas": (MIXED + "sharding_size: 2\n", []),
        "offload": (LAYERS + "offload_to_cpu: true\n", ["--distributed-backend", "cpu:gloo,cuda:nccl"])}


def collectives(text):
    """Number and bytes of collectives in a run on the simulated device."""
    return [int(number) for number in re.search(r"streams, (\d+) collectives of (\d+) bytes", text).groups()]


@pytest.mark.parametrize("name, world", [("fp32", 1), ("bf16", 1), ("bf16", 2), ("recompute", 2), ("kept", 2),
                                         ("replicas", 4), ("offload", 2)])
def test_a_plan_has_the_bytes_of_a_run(folder, name, world):
    config, flags = RUNS[name]
    if config.startswith(MIXED) and "avx512bw" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("the simulated device computes products in bf16 as this CPU does: by copies in fp32")
    said = plan(folder, SMALL, world, *flags, length=128, micro_batch=2, batches=2, config=config)
    batch = ["--micro-batch-size", 2, "--global-batch-size", 4 * world]
    taken = []
    for steps in (2, 3):
        metrics, log = pretrain(folder, *SMALL.flags(128), *batch, *flags, "--mock-data", "--eval-iters", 0, "--device",
                                "sim", "--init-model-with-meta-device", "--train-iters", steps, ranks=world,
                                config=config)
        taken.append(collectives(log))
    assert peak_of(said) == metrics[-1]["peak_memory_bytes"]
    of_step = [more - less for less, more in zip(*taken)]
    rows = re.findall(r"^(?:all_gather|reduce_scatter|all_reduce|broadcast) +(\d+) +(\d+)", said, re.M)
    assert [sum(int(row[i]) for row in rows) for i in (0, 1)] == of_step


def test_what_a_plan_does_without_is_not_checked(folder):
    others = "--save-best --finetune --profile --ckpt-step 3 --lr-decay-style WSD --min-lr 2 --callback nobody".split()
    assert plan(folder, SMALL, 2, *others, length=64) == plan(folder, SMALL, 2, length=64)


def test_weights_that_are_kept_are_gathered_once_a_step(folder):
    def gathers(batches):
        said = plan(folder, SMALL, 2, length=128, batches=batches, config=MIXED + KEPT)
        return int(re.search(r"^all_gather +(\d+)", said, re.M)[1])

    assert SMALL.layers + 1 <= gathers(1) == gathers(3)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_plan_of_a_cpu_has_what_is_resident(folder, name):
    """In a large network more than in a small one, in both: the program itself is left out."""
    config, _ = RUNS[name]
    if config == MIXED and "avx512bw" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("products in bf16 are copies in fp32 on this CPU")
    text = (ROOT / "launch" / "plan" / "devices" / "h200.yaml").read_text()
    (folder / "cpu.yaml").write_text(text + "program_memory: 100000000\n")
    planned, resident = [], []
    for model in (SMALL, Model(layers=4, hidden=768, ffn=2048, heads=12, groups=12, vocabulary=20000)):
        planned.append(peak_of(plan(folder, model, 2, "--device", folder / "cpu.yaml", length=128, config=config)))
        metrics, _ = pretrain(folder, *model.flags(128), "--micro-batch-size", 1, "--global-batch-size", 2,
                              "--mock-data", "--eval-iters", 0, "--init-model-with-meta-device", "--train-iters", 3,
                              ranks=2, config=config)
        resident.append(metrics[-1]["peak_memory_bytes"])
    assert planned[1] - planned[0] == pytest.approx(resident[1] - resident[0], rel=0.03)


def test_offloaded_rows_are_counted_on_the_host(folder):
    config = MIXED + "offload_to_cpu: true\n"
    said = plan(folder, LLAMA_7B, 8, config=config)
    rows = (LLAMA_7B.layers * LLAMA_7B.unit + LLAMA_7B.root) / 8
    host = int(re.search(r"^host memory of rank 0: .* \((\d+) bytes\)", said, re.M)[1])
    assert 16 * rows <= host < 16.01 * rows  # rows, gradients, two moments; some dimensions do not divide
    assert re.search(r"^optimizer state +0 ", said, re.M) and re.search(r"^sharded parameters +0 ", said, re.M)
    # Gathers read host memory, reductions write it, and the optimizer goes over it.
    assert seconds_of(said) > seconds_of(plan(folder, LLAMA_7B, 8)) + 28 * rows / 80e9


EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 64,
           "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
           "hidden_act": "silu", "tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 2,
           "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "router_aux_loss_coef": 0.0}


@pytest.mark.parametrize("spread", [1, 2])
def test_experts_get_as_many_tokens_each(folder, spread):
    (folder / "experts").mkdir(exist_ok=True)
    (folder / "experts" / "config.json").write_text(json.dumps(EXPERTS))
    config = LAYERS + (f"expert_parallel_size: {spread}\n" if spread > 1 else "")
    flags = ["--hf-model", folder / "experts", "--seq-length", 128, "--lr", "1e-4", "--micro-batch-size", 2,
             "--global-batch-size", 4, "--use-torch-fsdp2", *NO_DROPOUT]
    (folder / "plan.yaml").write_text(config)
    said = run(PROGRAM, "plan", "--world-size", 2, *flags, "--fsdp2-config-path", folder / "plan.yaml").stdout
    metrics, log = pretrain(folder, *flags, "--from-scratch", "--mock-data", "--eval-iters", 0, "--device", "sim",
                            "--init-model-with-meta-device", "--train-iters", 2, ranks=2, config=config)
    # The router of a run has favourites, which hold more.
    assert 0.9 * metrics[-1]["peak_memory_bytes"] < peak_of(said) <= 1.02 * metrics[-1]["peak_memory_bytes"]
    exchanges = re.search(r"^all_to_all +(\d+) +(\d+)", said, re.M)
    if spread == 1:
        assert exchanges is None
    else:  # of each layer: there and back, forward and backward; of all rows, half of which stay
        rows = 2 * 128 * EXPERTS["num_experts_per_tok"]
        assert [int(number) for number in exchanges.groups()] == [3 * 4, 3 * 4 * rows * EXPERTS["hidden_size"] * 4]
