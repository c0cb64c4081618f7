"""The PyTorch side of peers.py: Qwen2's architecture under FSDP2 on one rank, with fused AdamW.

One JSON line a step is appended to --metrics-file, with the names that `megashard pretrain` gives them. Parameters are
stored in fp32, gathered and computed in bf16, gradients reduced in fp32.
"""

import argparse
import json
import resource
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads, self.head = config["num_key_value_heads"], width // self.heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        q, k, v = (project(x).view(batch, length, -1, self.head).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, ffn, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.gate_proj, self.up_proj = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def token_loss(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), labels.flatten())


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.lm_head = None
        if not config["tie_word_embeddings"]:
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.loss = token_loss

    def angles(self, length, like):
        head = self.config["hidden_size"] // self.config["num_attention_heads"]
        exponents = torch.arange(0, head, 2, device=like.device, dtype=torch.float32) / head
        positions = torch.arange(length, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, self.config["rope_theta"]**-exponents)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def forward(self, tokens, labels):
        x = self.embed_tokens(tokens)
        cos, sin = self.angles(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return self.loss(self.norm(x), head.weight, labels)


def build(config, device, compile_backend):
    with torch.device("meta"):
        model = Decoder(config)
    if compile_backend:
        for layer in model.layers:
            layer.compile(backend=compile_backend)
        model.loss = torch.compile(token_loss, backend=compile_backend)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, config["initializer_range"])
    return model


def peak_memory(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--config", required=True, help="a config.json of Qwen2")
    for name in ("--seq-length", "--micro-batch-size", "--global-batch-size", "--train-iters"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--metrics-file", required=True)
    parser.add_argument("--compile", metavar="BACKEND")
    args = parser.parse_args()

    torch.manual_seed(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with open(args.config) as file:
        config = json.load(file)
    model = build(config, args.device, args.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    microbatches = args.global_batch_size // args.micro_batch_size
    for step in range(1, args.train_iters + 1):
        begin = time.perf_counter()
        total = 0
        for _ in range(microbatches):
            rows = torch.randint(config["vocab_size"], (args.micro_batch_size, args.seq_length + 1)).to(args.device)
            loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / microbatches
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        line = {"step": step, "loss": total.item(), "grad_norm": norm.item()}  # waits for the device
        seconds = time.perf_counter() - begin
        line |= {"step_s": seconds, "tokens_per_s": args.global_batch_size * args.seq_length / seconds,
                 "peak_memory_bytes": peak_memory(args.device)}
        with open(args.metrics_file, "a") as metrics:
            metrics.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
