"""The models that are trained: Qwen2's architecture at the sizes of its family, as config.json files."""

import dataclasses
import json

SEQUENCE = 1024
SEQUENCES_OF_STEP = 32


@dataclasses.dataclass(frozen=True)
class Model:
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = True
    sequence: int = SEQUENCE
    micro_batch: int = 1  # sequences, where the GPU has 80 GB; twice as many where it has LARGE_GPU_GIB
    global_batch: int = SEQUENCES_OF_STEP
    tokens_at_once: int = 0  # of a micro batch that fills a large GPU
    needed_gib: float = 0.0  # of GPU memory, to train it as the lines do

    def parameters(self):
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden**2 + 2 * self.hidden * kv + self.hidden + 2 * kv
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    def state_gib(self):
        """fp32 weights and both moments, as a checkpoint holds them."""
        return self.parameters() * 12 / 2**30

    def config(self):
        return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": self.hidden,
                "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "vocab_size": self.vocabulary,
                "max_position_embeddings": self.sequence, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                "tie_word_embeddings": self.tied, "hidden_act": "silu", "initializer_range": 0.02,
                "attention_dropout": 0.0, "torch_dtype": "float32"}

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=1))
        return folder


SIZES = {
    "0.5 B": Model(896, 4864, 24, 14, 2, 151936, micro_batch=8, tokens_at_once=65536, needed_gib=40),
    "1.5 B": Model(1536, 8960, 28, 12, 2, 151936, micro_batch=4, tokens_at_once=49152, needed_gib=60),
    "3 B": Model(2048, 11008, 36, 16, 2, 151936, micro_batch=2, tokens_at_once=24576, needed_gib=76),
    "4 B": Model(2560, 9728, 36, 20, 4, 151936, micro_batch=2, needed_gib=76),
    "7 B": Model(3584, 18944, 28, 28, 4, 152064, tied=False, micro_batch=4, tokens_at_once=12288,
                 needed_gib=130),
}
# For comparing devices and runs: wide enough to keep a GPU busy while the host enqueues.
SMALL = Model(512, 1408, 4, 8, 4, 2048, sequence=256, micro_batch=2, global_batch=2)
TINY = Model(64, 128, 2, 4, 2, 256, sequence=32, micro_batch=2, global_batch=4)  # of a dry run
LARGE_GPU_GIB = 120


def sized(name, machine):
    """The model of that size as this machine trains it."""
    if machine.dry_run:
        return TINY
    model = SIZES[name]
    doubled = machine.memory_gib >= LARGE_GPU_GIB and model.needed_gib < LARGE_GPU_GIB
    return dataclasses.replace(model, micro_batch=model.micro_batch * 2) if doubled else model


def filling(name, machine, sequence, microbatches):
    """The model of that size with a micro batch that fills a large GPU, for speed."""
    model = sized(name, machine)
    if machine.dry_run:
        return model
    large = machine.memory_gib >= LARGE_GPU_GIB
    at_once = max(1, (model.tokens_at_once if large else model.micro_batch * model.sequence) // sequence)
    return dataclasses.replace(model, sequence=sequence, micro_batch=at_once, global_batch=microbatches * at_once)


def largest(machine):
    """Name of the size that is trained with recompute."""
    return "7 B" if machine.dry_run or machine.memory_gib >= SIZES["7 B"].needed_gib else "4 B"
