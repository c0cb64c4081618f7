"""--save-hf: transformers loads the files that all ranks write when training ends, and computes the same logits."""
import copy
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import (AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM,
                          MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

import megashard
from megashard import INTEROP, LAYERS, TRACKER, USAGE, by_expert, convert, losses, mock_samples, run
from test_models import CASES

TRAINING = ("--mock-data --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --eval-iters 1 "
            "--eval-interval 2 --use-torch-fsdp2 --attention-dropout 0 --hidden-dropout 0 --peak-tflops 1 "
            "--ckpt-format torch_dcp")
FLAGS = ("--num-layers 2 --hidden-size 48 --num-attention-heads 6 --max-position-embeddings 32 --normalization RMSNorm "
         "--swiglu --position-embedding-type rope --rotary-base 500 --tokenizer-type NullTokenizer "
         "--vocab-size 60").split()
SMALL = dict(vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, eos_token_id=2)


def pretrain(folder, *flags, expect=0, wrap=LAYERS, save_interval=100):
    """Trains at two ranks; returns the losses and the output."""
    interval = f" --save-interval {save_interval}" if "--save" in flags else ""
    steps, out = megashard.pretrain(folder, *flags, ranks=2, defaults=TRAINING + interval, config=wrap, expect=expect)
    return losses(steps), out


def step_weights(save, step=None):
    """The model of a step (default: the latest), as PyTorch reads it."""
    step = step or int((save / TRACKER).read_text())
    dcp_to_torch_save(str(save / f"iter_{step:07d}"), str(save / "whole.pt"))
    return torch.load(save / "whole.pt", weights_only=False)["model"]


def check_weights(written, save):
    ours, step = load_file(written / "model.safetensors"), by_expert(step_weights(save))
    if "lm_head.weight" not in ours:  # tied: a step has it under both names
        assert step.pop("lm_head.weight").equal(step["model.embed_tokens.weight"])
    assert sorted(ours) == sorted(step)
    for name, tensor in step.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def check_logits(written, dtype, family=AutoModelForCausalLM):
    """Compares transformers' logits with ours; both read config.json and the weights."""
    model, notes = family.from_pretrained(written, output_loading_info=True)
    assert not any(notes.values()), notes
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    torch.manual_seed(1)
    tokens = torch.randint(0, 60, (2, 13))
    save_file({"tokens": tokens, "labels": tokens.clone()}, written / "input.bin")
    run(INTEROP / "model_logits", written)
    ours = load_file(written / "output.bin")["logits"]
    with torch.no_grad():
        wanted = model.float()(tokens).logits
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()  # as in test_models.py: other kernels
    return type(model).__name__


@pytest.mark.parametrize("family, config, edit, flags, dtype", [
    (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True), {}, [],
     torch.float32),
    (LlamaForCausalLM, LlamaConfig(**SMALL), {}, ["--bf16"], torch.bfloat16),
    (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True), {"tie_word_embeddings": False}, [],
     torch.float32),
    (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=6), {}, [], torch.float32),
    (Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=6, pad_token_id=None),
     {}, ["--apply-layernorm-1p"], torch.float32),
], ids=["tied", "bf16", "untied", "mistral", "gemma3"])
def test_a_model_of_transformers(tmp_path, family, config, edit, flags, dtype):
    """Trained and written as it is kept; the training is stopped by --exit-interval. The model was stored in the other
    dtype."""
    if dtype == torch.float32:
        flags = [*flags, "--save-hf-dtype", "fp32"]
    source, written, save = tmp_path / "source", tmp_path / "written", tmp_path / "save"
    torch.manual_seed(0)
    family(config).to(torch.bfloat16 if dtype == torch.float32 else torch.float32).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    says = json.loads((source / "config.json").read_text()) | edit
    (source / "config.json").write_text(json.dumps(says))
    _, out = pretrain(tmp_path, "--hf-model", source, "--train-iters", 9, "--exit-interval", 3, "--save", save,
                      "--save-hf", written, *flags)
    assert f"successfully saved Hugging Face files to {written}" in out
    assert sorted(path.name for path in written.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    check_weights(written, save)
    tied = says["tie_word_embeddings"]
    assert ("has no lm_head.weight, and config.json says" in out) == (config.tie_word_embeddings and not tied)
    assert ("lm_head.weight" in load_file(written / "model.safetensors")) == (not tied)
    assert check_logits(written, dtype) == family.__name__
    _, out = pretrain(tmp_path, "--hf-model", source, "--train-iters", 1, "--save-hf", source / "../source",
                      expect=USAGE)
    assert "is --hf-model's directory, whose weights it would replace" in out


@pytest.mark.parametrize("stored, training, flag, dtype", [
    (torch.bfloat16, [], [], torch.bfloat16),
    (torch.bfloat16, ["--lora-r", 4, "--lora-target-modules", "all-linear"], [], torch.bfloat16),
    (torch.bfloat16, ["--from-scratch"], [], torch.float32),
    (torch.float16, [], [], torch.float16),
    (torch.float32, [], ["--save-hf-dtype", "bf16"], torch.bfloat16),
], ids=["files", "adapters", "from scratch", "fp16", "flag"])
def test_the_dtype_is_that_of_the_files(tmp_path, stored, training, flag, dtype):
    """Written weights are those of training, rounded once."""
    source, written, whole = (tmp_path / name for name in ("source", "written", "whole"))
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, dtype=stored)).to(stored)
    model.model.layers[0].input_layernorm.float()  # as some models keep their norms: most bytes count
    model.save_pretrained(source)
    for target, flags in ((whole, ["--save-hf-dtype", "fp32"]), (written, flag)):
        _, out = pretrain(tmp_path, "--hf-model", source, "--train-iters", 2, "--save-hf", target, *training, *flags)
    assert f"saving the weights as Hugging Face files to {written} in {str(dtype).removeprefix('torch.')}" in out
    ours, exact = load_file(written / "model.safetensors"), load_file(whole / "model.safetensors")
    assert {each.dtype for each in exact.values()} == {torch.float32}
    assert all(torch.equal(ours[name], value.to(dtype)) for name, value in exact.items()) and len(ours) == len(exact)
    loaded, notes = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
    assert not any(notes.values()), notes
    assert loaded.dtype == loaded.config.dtype == dtype


def test_experts_by_themselves_and_stacked(tmp_path):
    """Two ranks read either form and write either; transformers reads both."""
    config = Qwen3MoeConfig(**SMALL | dict(num_hidden_layers=2), head_dim=16, num_experts=5, num_experts_per_tok=2,
                            moe_intermediate_size=20, output_router_logits=True)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    written = {}
    for stacked in (False, True):
        source, target, save = (tmp_path / f"{name}_{stacked}" for name in ("source", "written", "save"))
        model.save_pretrained(source, save_original_format=not stacked)
        pretrain(tmp_path, "--hf-model", source, "--train-iters", 2, "--save", save, "--save-hf", target,
                 *["--save-hf-stacked-experts"][:stacked])
        if not stacked:
            check_weights(target, save)
        assert check_logits(target, torch.float32) == "Qwen3MoeForCausalLM"
        written[stacked] = load_file(target / "model.safetensors")
    convert("hf_to_dcp", "--hf-dir", tmp_path / "written_True", "--dcp-dir", tmp_path / "dcp")
    convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", tmp_path / "back",
            "--model-assets-dir", tmp_path / "source_True")
    by_themselves = read_weights(tmp_path / "back")
    assert sorted(by_themselves) == sorted(written[False])
    assert all(torch.equal(by_themselves[name], value) for name, value in written[False].items())
    one = "model.layers.1.mlp.experts."
    for expert in range(5):
        gate, up, down = (written[False][f"{one}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(written[True][one + "gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(written[True][one + "down_proj"][expert], down)
    ours = step_weights(tmp_path / "save_False")
    packed = {name: value.flatten(1, 2) if value.dim() == 4 else value for name, value in ours.items()}
    from_ours, _ = pretrain(tmp_path, "--hf-model", tmp_path / "source_False", "--train-iters", 1, "--finetune",
                            "--load", tmp_path / "save_False")
    for form, weights in (("separate", by_expert(ours)), ("packed", packed)):  # of earlier versions; of PyTorch
        step, target = tmp_path / form / "iter_0000002", tmp_path / f"of_{form}"
        dcp.save({"model": weights}, checkpoint_id=str(step), no_dist=True)
        (tmp_path / form / TRACKER).write_text("2")
        from_step, _ = pretrain(tmp_path, "--hf-model", tmp_path / "source_False", "--train-iters", 1, "--finetune",
                                "--load", tmp_path / form)
        assert from_step == from_ours
        convert("dcp_to_hf", "--load-dir", step, "--save-dir", target, "--model-assets-dir", tmp_path / "source_False")
        again = read_weights(target)
        assert sorted(again) == sorted(by_expert(ours))
        assert all(torch.equal(again[name], value) for name, value in by_expert(ours).items())


FUSED = {"self_attn.qkv_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
         "mlp.gate_up_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"]}


@pytest.mark.parametrize("flags", [[], ["--tensor-model-parallel-size", 2]], ids=["sharded", "cut"])
def test_layers_that_files_have_as_one(tmp_path, flags):
    """Two ranks read and write Phi-3's fused layers, and read the layers by themselves."""
    source, apart, written, save = (tmp_path / name for name in ("source", "apart", "written", "save"))
    torch.manual_seed(0)
    Phi3ForCausalLM(Phi3Config(**SMALL | dict(vocab_size=132), pad_token_id=None)).save_pretrained(source)
    first, _ = pretrain(tmp_path, "--hf-model", source, "--train-iters", 2, "--save", save, "--save-hf", written,
                        *flags)
    ours, step = load_file(written / "model.safetensors"), step_weights(save)
    fused = {f"model.layers.{i}.{name}": [f"model.layers.{i}.{part}" for part in parts]
             for i in range(3) for name, parts in FUSED.items()}
    for name, parts in fused.items():
        assert torch.equal(ours.pop(name), torch.cat([step.pop(part) for part in parts])), name
    assert sorted(ours) == sorted(step) and all(torch.equal(ours[name], value) for name, value in step.items())
    assert check_logits(written, torch.float32) == "Phi3ForCausalLM"
    weights = load_file(source / "model.safetensors")
    for name, parts in fused.items():
        whole = weights.pop(name)
        rows = [48, 16, 16] if len(parts) == 3 else [80, 80]
        weights |= {part: piece.clone() for part, piece in zip(parts, whole.split(rows))}
    apart.mkdir()
    (apart / "config.json").write_text((source / "config.json").read_text())
    save_file(weights, apart / "model.safetensors")
    again, _ = pretrain(tmp_path, "--hf-model", apart, "--train-iters", 2, *flags)
    assert again == first


@pytest.mark.parametrize("name, flags", [
    ("LlamaForCausalLM", ["--disable-bias-linear", "--use-rope-scaling", "--untie-embeddings-and-output-weights"]),
    ("LlamaForCausalLM", ["--rotary-seq-len-interpolation-factor", "2"]),
    ("Qwen2ForCausalLM", ["--disable-bias-linear", "--add-qkv-bias", "--group-query-attention", "--num-query-groups",
                          "2"]),
    ("Qwen3ForCausalLM", ["--disable-bias-linear", "--qk-layernorm", "--kv-channels", "16"]),
    ("Qwen3MoeForCausalLM", ["--disable-bias-linear", "--qk-layernorm", "--num-experts", "5", "--moe-ffn-hidden-size",
                             "20", "--moe-layer-freq", "[1]*1+[0]*1", "--moe-router-pre-softmax"]),
])
def test_a_network_of_flags(tmp_path, name, flags):
    """config.json is written from the flags, and read back it is the same network: the next step's loss is the same
    bits."""
    written, save = tmp_path / "written", tmp_path / "save"
    pretrain(tmp_path, *FLAGS, *flags, "--train-iters", 3, "--save", save, "--save-hf", written)
    assert sorted(path.name for path in written.iterdir()) == ["config.json", "model.safetensors"]
    check_weights(written, save)
    goes_on, _ = pretrain(tmp_path, *FLAGS, *flags, "--train-iters", 1, "--load", save, "--finetune")
    (tmp_path / "config.json").write_text('{"eos_token_id": 60}')  # NullTokenizer's end of a document
    from_files, _ = pretrain(tmp_path, "--hf-model", written, "--tokenizer-model", tmp_path, "--train-iters", 1)
    assert from_files == goes_on
    assert check_logits(written, torch.float32) == name


def test_a_network_that_transformers_lacks_is_refused_before_training(tmp_path):
    gpt = [flag for flag in FLAGS if flag != "--swiglu"]
    losses, out = pretrain(tmp_path, *gpt, "--train-iters", 1, "--save-hf", tmp_path / "written", expect=USAGE)
    assert "--save-hf: transformers' Llama, Qwen2, Qwen3 and Qwen3-MoE do not compute the network of these flags" in out
    assert not losses and not (tmp_path / "written").exists()


def test_published_names_of_a_vision_language_model(tmp_path):
    """Qwen2.5-VL is published as visual.* and model.*, transformers names it model.visual.* and model.language_model.*:
    both are read, the first is written. Text alone: the tower's gradients are zeros, and its weights only decay."""
    family, config = CASES["qwen2_5_vl"]
    config = copy.deepcopy(config)
    config.text_config.eos_token_id = 2  # ends the documents of mock data
    source, renamed, written = tmp_path / "source", tmp_path / "renamed", tmp_path / "written"
    torch.manual_seed(0)
    family(config).save_pretrained(source)
    names = load_file(source / "model.safetensors")
    assert "visual.merger.ln_q.weight" in names and "model.norm.weight" in names
    renamed.mkdir()
    (renamed / "config.json").write_text((source / "config.json").read_text())
    save_file({("model." if name.startswith("visual.") else "") + name.replace("model.", "model.language_model."): value
               for name, value in names.items()}, renamed / "model.safetensors")
    losses, said = pretrain(tmp_path, "--train-iters", "2", "--hf-model", renamed, "--save-hf", written,
                            "--weight-decay", "0", wrap="num_to_forward_prefetch: 1")
    assert len(losses) == 2 and "model.visual.blocks.{*} -> 3 modules" in said
    ours = load_file(written / "model.safetensors")
    assert sorted(ours) == sorted(names)
    for name, value in names.items():
        assert torch.equal(ours[name], value) == name.startswith("visual."), name
    check_logits(written, torch.float32, family)

    convert("hf_to_dcp", "--hf-dir", source, "--dcp-dir", tmp_path / "dcp")
    convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", tmp_path / "back",
            "--model-assets-dir", source)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(back) == sorted(names) and all(torch.equal(back[name], value) for name, value in names.items())
    losses_of_step, _ = pretrain(tmp_path, "--train-iters", "2", "--hf-model", source, "--load", tmp_path / "dcp",
                                 "--finetune", "--weight-decay", "0", wrap="num_to_forward_prefetch: 1")
    assert losses_of_step == losses  # its keys are the model's


def read_weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("size, published", [(20, True), (24, False)], ids=["published", "square"])
def test_stacked_experts_of_a_vision_language_model(tmp_path, size, published):
    """transformers 5 writes what it has in memory, [E, 2 I, C] and [E, C, I]; published files are transposed, and we
    write these unless a square stack would not let transformers tell. Two ranks with an expert's rows each, then the
    converters."""
    family, config = CASES["qwen3_vl_moe"]
    config = copy.deepcopy(config)
    config.text_config.eos_token_id, config.text_config.moe_intermediate_size = 2, size
    source, written, back = tmp_path / "source", tmp_path / "written", tmp_path / "back"
    torch.manual_seed(0)
    family(config).save_pretrained(source)
    flags = ["--train-iters", "2", "--weight-decay", "0", "--hf-model"]
    trained, _ = pretrain(tmp_path, *flags, source, "--save-hf", written, wrap="num_to_forward_prefetch: 1")
    before, ours = read_weights(source), read_weights(written)
    assert sorted(ours) == sorted(before)
    stacks = [name for name in ours if ".experts." in name]
    assert len(stacks) == 4
    for name in stacks:
        assert ours[name].shape == (before[name].mT if published else before[name]).shape
    check_logits(written, torch.float32, family)

    convert("hf_to_dcp", "--hf-dir", written, "--dcp-dir", tmp_path / "dcp")
    convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", back, "--model-assets-dir", source)
    again = read_weights(back)
    assert sorted(again) == sorted(ours) and all(torch.equal(again[name], value) for name, value in ours.items())
    convert("hf_to_dcp", "--hf-dir", source, "--dcp-dir", tmp_path / "start")
    from_step, _ = pretrain(tmp_path, *flags, source, "--load", tmp_path / "start", "--finetune",
                            wrap="num_to_forward_prefetch: 1")
    assert from_step == trained  # its keys are the model's


def mock_batches(folder, steps):
    """[steps, 4 rows, 17 tokens] of TRAINING's mock data for the models of SMALL."""
    samples = mock_samples(folder, steps * 4, length=16, vocabulary=SMALL["vocab_size"], end=SMALL["eos_token_id"])
    return samples.view(steps, 4, 17)


def trained_by_peft(source, adapters, batches):
    """Trains from those adapters: the losses of AdamW's steps, and the adapters after the first step."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    model = get_peft_model(LlamaForCausalLM.from_pretrained(source), LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    set_peft_model_state_dict(model, adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses, first = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0), [], None
    for tokens in batches:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        first = first or {name: weight.clone() for name, weight in get_peft_model_state_dict(model).items()}
    return losses, first


@pytest.mark.parametrize("recompute", [[], ["--recompute-granularity", "full", "--recompute-method", "uniform",
                                            "--recompute-num-layers", 1, "--init-model-with-meta-device"]],
                         ids=["plain", "recompute"])
def test_adapters_alone_are_trained_and_saved_and_merged_on_export(tmp_path, recompute):
    source, written, save = tmp_path / "source", tmp_path / "written", tmp_path / "save"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(source)
    flags = ["--hf-model", source, "--lora-r", 4, "--lora-alpha", 8, "--lora-target-modules", "q_proj", "down_proj",
             "--weight-decay", 0, "--lr-decay-style", "constant", "--train-iters", 4, *recompute]
    straight, _ = pretrain(tmp_path, *flags)
    pretrain(tmp_path, *flags, "--exit-interval", 2, "--save", save, save_interval=1)
    stored = step_weights(save)
    assert {name.split(".", 3)[3] for name in stored} == {
        f"{layer}.lora_{letter}.weight" for layer in ("self_attn.q_proj", "mlp.down_proj") for letter in "AB"}
    resumed, _ = pretrain(tmp_path, *flags, "--load", save, "--save", save, "--save-hf", written)
    assert resumed == straight[2:]

    final = step_weights(save)
    # The first step moves only the B, which are zeros before: the A have no gradient yet.
    first = {f"base_model.model.{name}": weight for name, weight in step_weights(save, 1).items()}
    losses, adapters = trained_by_peft(source, {name: weight * ("lora_A" in name) for name, weight in first.items()},
                                       mock_batches(tmp_path, 4))
    # AdamW moves elements whose gradient is rounding as far as others: PyTorch in fp32 and in fp64 are 2e-6 apart at
    # step 3.
    assert straight == pytest.approx(losses, rel=2e-5) and straight[:2] == pytest.approx(losses[:2], rel=2e-6)
    assert first.keys() == adapters.keys()
    for name, weight in adapters.items():
        assert (first[name] - weight).abs().max() <= 1e-3 * weight.abs().max(), name
    before, after = load_file(source / "model.safetensors"), load_file(written / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        adapter = name.removesuffix("weight")
        if adapter + "lora_A.weight" in final:
            product = final[adapter + "lora_B.weight"] @ final[adapter + "lora_A.weight"]
            assert product.abs().max() > 1e-3
            weight = weight + 8 / 4 * product
        torch.testing.assert_close(after[name], weight)
    config = json.loads((written / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    alone = load_file(written / "adapter" / "adapter_model.safetensors")
    assert alone.keys() == {f"base_model.model.{name}" for name in final}
    assert all(torch.equal(alone[f"base_model.model.{name}"], weight) for name, weight in final.items())
    from peft import PeftModel

    tokens = torch.randint(0, 60, (2, 13))
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(source),
                                            written / "adapter")(tokens).logits
        merged = LlamaForCausalLM.from_pretrained(written)(tokens).logits
    assert (merged - adapted).abs().max() <= 1e-5 * adapted.abs().max()  # other products, rounded otherwise
    assert check_logits(written, torch.float32) == "LlamaForCausalLM"


def test_adapters_that_cannot_be_are_refused(tmp_path):
    source = tmp_path / "source"
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(source)
    flags = ["--train-iters", 1, "--lora-r", 4]
    for more, message in ((["--hf-model", source], "--lora-r needs --lora-target-modules"),
                           ([*FLAGS, "--lora-target-modules", "q_proj"], "--lora-r needs --hf-model")):
        assert message in pretrain(tmp_path, *flags, *more, expect=USAGE)[1]
    _, out = pretrain(tmp_path, *flags, "--hf-model", source, "--lora-target-modules", "q_proj", "query", expect=1)
    assert "the model has no linear layer query; it has down_proj, gate_proj" in out
