"""megashard convert holds a tensor at a time."""

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from megashard import PROGRAM, peak_bytes

MIB = 1 << 20
BUFFERS = 4 * 8 * MIB  # of a file being written: blocks under way and the one that is filled (output_file.cpp)


def llama_of(folder, layers, hidden):
    """Weights by hand, the largest of them [2 hidden, hidden], with a config.json; the bytes of that one."""
    sizes = {"embed_tokens": (2 * hidden, hidden), "norm": (hidden,)}
    for i in range(layers):
        sizes |= {f"layers.{i}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        sizes |= {f"layers.{i}.mlp.{name}_proj": (2 * hidden, hidden) for name in ("gate", "up")}
        sizes |= {f"layers.{i}.mlp.down_proj": (hidden, 2 * hidden)}
        sizes |= {f"layers.{i}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    folder.mkdir()
    save_file({f"model.{name}.weight": torch.full(size, 1.0) for name, size in sizes.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(vocab_size=2 * hidden, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
                architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return 2 * hidden * hidden * 4


def test_memory_is_that_of_one_tensor(tmp_path):
    """Of 128 MiB in weights of 8 MiB at most, each converter holds, beyond one of nothing and the buffers of a file, a
    weight as it is read, a weight as it is written, and one more; in Megatron's layout a written weight is two read
    ones."""
    llama_of(tmp_path / "small", 1, 8)
    weight = llama_of(tmp_path / "hf", 3, 1024)
    nothing = peak_bytes(PROGRAM, "convert", "hf_to_dcp", "--hf-dir", tmp_path / "small", "--dcp-dir",
                         tmp_path / "small_dcp")
    peaks = {}

    def run(name, *words, kind=""):
        peaks[name + kind] = peak_bytes(PROGRAM, "convert", name, *words) - nothing

    hf, dcp, file = tmp_path / "hf", tmp_path / "dcp" / "release", tmp_path / "whole.pt"
    assets = ("--model-assets-dir", hf)
    run("hf_to_dcp", "--hf-dir", hf, "--dcp-dir", dcp.parent)
    run("dcp_to_hf", "--load-dir", dcp, "--save-dir", tmp_path / "back", *assets)
    run("dcp_to_torch", "--dcp-dir", dcp, "--torch-save-path", file)
    run("torch_to_dcp", "--torch-save-path", file, "--dcp-dir", tmp_path / "again")
    for kind, layout in (("", ()), (", layout", ("--megatron-layout",))):
        dist, of_dcp = tmp_path / f"dist{kind}" / "release", tmp_path / f"of_dcp{kind}"
        run("hf_to_torch_dist", "--hf-dir", hf, "--save-dir", dist.parent, *layout, kind=kind)
        run("torch_dist_to_hf", "--load-dir", dist, "--save-dir", tmp_path / f"back{kind} of dist", *assets, *layout,
            kind=kind)
        run("torch_dist_to_dcp", "--load-dir", dist, "--save-dir", tmp_path / f"dcp{kind} again", *assets, *layout,
            kind=kind)
        run("dcp_to_torch_dist", "--load-dir", dcp, "--save-dir", of_dcp, *assets, *layout, kind=kind)
    plans = MIB  # names, sizes and places of the weights: 0.3 MiB more than those of nothing
    most = {name: BUFFERS + plans + weight * (5 if "layout" in name else 3) for name in peaks}
    assert all(peak < most[name] for name, peak in peaks.items()), {name: peak // MIB for name, peak in peaks.items()}
