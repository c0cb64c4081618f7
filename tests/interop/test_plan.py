"""`megashard plan`: its peak beside PyTorch's FSDP2 at 7 B, its bytes beside those of runs with memory, and its limits.

docs/benchmarks.md (Bytes of a step) and docs/plan.md have the figures: pytest -s prints them.
"""
import dataclasses
import json
import pathlib
import re
import sys
import time

import pytest

from megashard import INTEROP, LAYERS, NO_DROPOUT, PROGRAM, ROOT, environment, peak_bytes, pretrain, run

sys.path.append(str(ROOT / "tests" / "benchmarks"))
import forecast  # noqa: E402

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
    """Of a run on the simulated device: how many, and their bytes."""
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


# --- time ---

def seconds_of(text, what="step"):
    """Of the step, or what of its communication is "exposed"."""
    return float(re.search(rf"^{what}: ([\d.]+) ms", text, re.M)[1]) / 1e3


@pytest.mark.parametrize("size", ["0.5 B", "7 B"])
def test_a_step_takes_what_the_forecast_says(folder, size):
    forecast_run = forecast.RUNS[size]
    shape = dataclasses.replace(forecast.SIZES[size], sequence=4096)
    model = Model(shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.vocabulary, bias=True)
    flags = [word for word in model.flags(4096) if word != "--untie-embeddings-and-output-weights" or not shape.tied]
    (folder / "plan.yaml").write_text(MIXED + (KEPT if forecast_run.kept else ""))
    micro_batch = shape.tokens_at_once // 4096
    said = run(PROGRAM, "plan", *flags, "--micro-batch-size", micro_batch, "--global-batch-size",
               micro_batch * forecast_run.micro_batches, "--fsdp2-config-path", folder / "plan.yaml").stdout
    kernels = forecast.step(shape, forecast_run, forecast.FUSED)
    expected = sum(kernel.seconds(forecast.MACHINES["H200"]) for kernel in kernels)
    assert seconds_of(said) == pytest.approx(expected, rel=0.02)  # it leaves small operators out


# Of an H200, 2026-11-27 (docs/benchmarks.md): sequences of 1,024 in a micro batch, such batches, bytes, seconds a step.
SMALL_MOMENTS = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
ON_H200 = {"0.5 B": (32, 4, KEPT, (), 41804899328, 0.866), "1.5 B": (32, 4, KEPT, (), 96846085632, 2.242),
           "3 B": (16, 8, KEPT, (), 111131508224, 4.439), "7 B": (8, 6, "", SMALL_MOMENTS, 132122213376, 3.777)}


@pytest.mark.parametrize("size", ON_H200)
def test_a_plan_has_what_a_gpu_had(folder, size):
    """Bytes within 0.4% and seconds within 3%; what was planned of them on the day was within 0.2%. Since then the
    products of SwiGLU are not kept, of all layers but the one that is in backward; weights that are kept are gathered
    once a step, for 6 bytes a parameter; and gradients of later micro batches are added without being cast first, for
    10 bytes instead of 18."""
    micro_batch, batches, kept, flags, peak, seconds = ON_H200[size]
    forecast.SIZES[size].write(folder / "model")
    (folder / "plan.yaml").write_text(MIXED + kept)
    said = run(PROGRAM, "plan", "--hf-model", folder / "model", "--from-scratch", "--init-model-with-meta-device",
               "--seq-length", 1024, "--micro-batch-size", micro_batch, "--global-batch-size", micro_batch * batches,
               "--lr", 1e-4, "--use-torch-fsdp2", "--fsdp2-config-path", folder / "plan.yaml", "--world-size", 1,
               "--device", "h200", *flags).stdout
    shape = forecast.SIZES[size]
    products = 2 * 1024 * micro_batch * (shape.layers - 1) * shape.ffn
    assert peak_of(said) == pytest.approx(peak - products, rel=0.004)
    casts = (14 if kept else 8) * shape.parameters() * (batches - 1) / (forecast.SHARES["bandwidth"] * 4.8e12)
    assert seconds_of(said) == pytest.approx(seconds - casts, rel=0.03)


def test_measured_products_take_their_time(folder):
    def step(flops):
        sizes = [(m, n, k) for m in (16, 4096) for n in (16, 4096) for k in (16, 4096)]
        products = [{"bits": 32, "m": m, "n": n, "k": k, "flops": flops} for m, n, k in sizes]
        text = (ROOT / "launch" / "plan" / "devices" / "h200.yaml").read_text()
        (folder / "device.yaml").write_text(text + f"products: {json.dumps(products)}\n")
        return seconds_of(plan(folder, SMALL, 1, "--device", folder / "device.yaml", length=128, config=LAYERS))

    matrices = SMALL.layers * (4 * SMALL.hidden**2 + 3 * SMALL.hidden * SMALL.ffn) + SMALL.vocabulary * SMALL.hidden
    assert step(1e9) - step(2e9) == pytest.approx(6 * 128 * matrices / 2e9, rel=0.02)


def test_a_slow_network_is_exposed_and_a_fast_one_is_hidden(folder):
    text = (ROOT / "launch" / "plan" / "devices" / "h200.yaml").read_text()
    steps = []
    for bandwidth in ("1e15", "45e9", "1e9"):
        (folder / "device.yaml").write_text(re.sub(r"network_bandwidth: \S+", f"network_bandwidth: {bandwidth}", text))
        said = plan(folder, LLAMA_7B, 64, "--device", folder / "device.yaml")
        rows = re.findall(r"^(?:all_gather|reduce_scatter) .* ([\d.]+)$", said, re.M)
        moved = sum(map(float, rows)) / 1e3
        steps.append((seconds_of(said), seconds_of(said, "exposed"), moved))
    for step, exposed, moved in steps:
        assert step > 0.99 * moved and exposed < step  # one collective after the other
    fast, usual, slow = steps
    assert fast[1] < 0.03 * fast[0] and usual[1] < 0.05 * usual[0]
    assert slow[1] > 0.8 * (slow[2] - fast[0])  # gathers and reductions follow one another, and compute waits
    assert slow[0] > 2 * usual[0] and usual[0] >= fast[0]


def test_a_trace_has_the_step(folder):
    said = plan(folder, LLAMA_7B, 16, "--trace", folder / "trace.json")
    all_events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    events = [event for event in all_events if event["ph"] == "X"]
    ends = [event["ts"] + event["dur"] for event in events if event["tid"] == 0]
    assert max(ends) / 1e6 == pytest.approx(seconds_of(said), rel=0.02)  # it begins with the copy of a batch
    gathers = [event for event in events if event["name"].startswith("all_gather")]
    assert len(gathers) == int(re.search(r"^all_gather +(\d+)", said, re.M)[1])
    assert any("model.layers.30" in event["name"] for event in gathers)
    links = sorted((event["ts"], event["ts"] + event["dur"]) for event in events
                   if event["name"].split()[0] in ("all_gather", "reduce_scatter"))
    assert all(end <= begin + 1e-6 for (_, end), (begin, _) in zip(links, links[1:]))  # one at a time
    memory = [event for event in all_events if event["ph"] == "C"]
    times = [event["ts"] for event in memory]
    assert times == sorted(times) and len(times) > 100 and 0 <= times[0] and times[-1] <= max(ends)
    assert 0.95 * peak_of(said) < max(sum(event["args"].values()) for event in memory) <= peak_of(said)
    parts = dict(re.findall(r"^([a-z ]+?)  +(\d+) +[\d.]+$", said[:said.index("collectives of a step")], re.M))
    assert list(memory[0]["args"]) == ["sharded parameters", "gradients", "optimizer state", "unsharded parameters",
                                       "communication buffers", "activations and the rest"]
    for name in ("sharded parameters", "optimizer state"):
        assert {event["args"][name] for event in memory} == {int(parts[name])}
    # Activations grow over forward and are gone at the end; gradients are there in backward.
    ends_with, most = memory[-1]["args"], lambda name: max(event["args"][name] for event in memory)
    assert ends_with["activations and the rest"] < 0.1 * most("activations and the rest")
    assert memory[0]["args"]["gradients"] < most("gradients") and most("unsharded parameters") > 0


# --- the search ---

def test_the_fastest_that_fits_is_found(folder):
    said = plan(folder, LLAMA_7B, 16, "--fit", "--device-memory", "30GiB", batches=4)
    trials = re.findall(r"^ +(\d+) +(full|-) +(true|false) +(all|8) +- +([\d.]+) +(fits|does not fit) +([\d.]+) ", said,
                        re.M)
    assert len({trial[:4] for trial in trials}) == len(trials) > 16
    for *_, gib, fits, _ in trials:
        assert (float(gib) <= 30) == (fits == "fits")
    best = min((trial for trial in trials if trial[5] == "fits"), key=lambda trial: float(trial[6]))
    micro_batch, recompute, reshards, shards, gib, _, ms = best
    told = re.search(r"^fastest that fits: (--micro-batch-size \d+)(.*?); (.*)$", said, re.M)
    assert told[1] == f"--micro-batch-size {micro_batch}"
    assert told[2].split() == (RECOMPUTE if recompute == "full" else [])
    # The same flags by hand are the same plan.
    again = plan(folder, LLAMA_7B, 16, *told[2].split(), micro_batch=int(micro_batch), batches=4 // int(micro_batch),
                 config=MIXED + told[3].replace("; ", "\n") + "\n")
    assert f"{peak_of(again) / 2**30:.2f}" == gib and f"{1e3 * seconds_of(again):.2f}" == ms
    assert f"reshard_after_forward: {reshards}" in told[3] and ("sharding_size: 8" in told[3]) == (shards == "8")


def test_host_memory_is_tried_where_nothing_else_fits(folder):
    said = plan(folder, LLAMA_7B, 2, "--fit", "--device-memory", "40GiB", batches=2)
    trials = re.findall(r"^ +\d+ +(?:full|-) +(?:true|false) +all +(yes|-) +([\d.]+) +(fits|does not fit) ", said, re.M)
    assert {fits for offloads, _, fits in trials if offloads == "-"} == {"does not fit"}
    assert "fits" in {fits for offloads, _, fits in trials if offloads == "yes"}
    assert re.search(r"^fastest that fits: .*; offload_to_cpu: true$", said, re.M)


# --- limits ---

def test_70b_on_2816_ranks_is_planned_in_seconds(folder):
    begin = time.monotonic()
    said = plan(folder, LLAMA_70B, 2816, *RECOMPUTE, "--device-memory", "139GiB")
    assert time.monotonic() - begin < 10
    (folder / "plan.yaml").write_text(MIXED)
    assert peak_bytes(PROGRAM, "plan", "--world-size", 2816, *LLAMA_70B.flags(4096), *RECOMPUTE, "--micro-batch-size",
                      1, "--global-batch-size", 2816, "--fsdp2-config-path", folder / "plan.yaml",
                      env=environment()) < 1e9
    assert "70.554 B parameters, 2816 x NVIDIA H200" in said and ": fits" in said


@pytest.mark.parametrize("schedule", [
    "--lr 1e-4", "--lr 1e-4 --train-iters 10000 --lr-warmup-iters 2000",
    "--lr-warmup-iters 3", "--lr-decay-style cosine --lr-warmup-fraction 0.9 --lr-decay-iters 20 --min-lr 1e-5",
    "--train-samples 9000 --lr-warmup-samples 900 --lr-decay-samples 8000 --rampup-batch-size 2 2 100",
    "--train-iters 50 --lr-decay-style WSD --lr-wsd-decay-iters 10"])
def test_a_plan_needs_no_learning_rate(folder, schedule):
    """Nor --use-torch-fsdp2; and the training's schedule, which is longer than the plan, does not change it."""
    (folder / "plan.yaml").write_text(LAYERS)
    flags = [*SMALL.flags(16), "--micro-batch-size", 1, "--global-batch-size", 8, "--world-size", 2,
             "--fsdp2-config-path", folder / "plan.yaml"]
    for flag, count in (("--lr", 2), ("--use-torch-fsdp2", 1)):
        at = flags.index(flag)
        del flags[at:at + count]
    without, given = (run(PROGRAM, "plan", *flags, *each).stdout for each in ([], schedule.split()))
    assert without == given and "step: " in given


def test_what_does_not_fit_is_told(folder):
    said = plan(folder, LLAMA_7B, 8, "--device-memory", "20GiB")
    assert "20.00 GiB: DOES NOT FIT" in said


@pytest.mark.parametrize("flags, message", [
    (["--device", "h300"], "the device h300 is neither a file nor one of a100, b200, h100, h200, l40s, mi300x, "),
    (["--device", "4090"], "; did you mean rtx4090?"),
    (["--device-memory", "much"], '--device-memory takes bytes, as 139GiB or 80GB, got "much"'),
    (["--fit", "yes"], 'unexpected word "yes" after --fit'),
    (["--fit"], "--fit needs --global-batch-size"),
    (["--world-size", "none"], '--world-size takes a number of ranks, got "none"')])
def test_wrong_flags_are_told(folder, flags, message):
    done = run(PROGRAM, "plan", *SMALL.flags(16), "--micro-batch-size", 1, *flags, expect=2)
    assert message in done.stdout + done.stderr


def test_each_device_that_comes_along_is_planned(folder):
    """At two sizes: in GiB where there is much, as a number that is not 0 where there is little."""
    files = sorted((ROOT / "launch" / "plan" / "devices").glob("*.yaml"))
    assert [file.stem for file in files] == ["a100", "b200", "h100", "h200", "l40s", "mi300x", "rtx4090"]
    for file in files:
        name = re.search("^name: (.*)", file.read_text(), re.M)[1]
        said = plan(folder, SMALL, 2, "--device", file.stem.upper(), length=16, config=LAYERS)
        assert f"plan: 0.326 M parameters, 2 x {name}\n" in said and "have not been compared with runs" in said
    said = plan(folder, LLAMA_7B, 1)
    assert re.search(r"^of these +bytes +GiB$", said, re.M) and "have not been compared" not in said
    assert "\nwithout --device the plan is of h200; there are a100, " in said


def test_a_device_file_says_what_it_lacks(folder):
    (folder / "device.yaml").write_text("name: mine\nmemry: 1GiB\n")
    done = run(PROGRAM, "plan", *SMALL.flags(16), "--micro-batch-size", 1, "--device", folder / "device.yaml", expect=2)
    assert 'device.yaml:2: unknown key "memry"; did you mean memory?' in done.stdout + done.stderr
