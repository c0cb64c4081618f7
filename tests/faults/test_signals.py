"""Signals with a handler, a thousand a second, change nothing of a training: its steps, saves and evaluations have the
bits of a quiet run, whatever kernels the CPU takes."""
import json
import shutil

import pytest

from megashard import LAYERS, environment, losses, pretrain, run, write_documents

# No SA_RESTART, as of profilers and timers: each call of the system may be interrupted, too.
STORM = """
#include <signal.h>
#include <sys/time.h>
static void nothing(int) {}
__attribute__((constructor)) static void begin() {
  struct sigaction action {};
  action.sa_handler = nothing;
  sigaction(SIGALRM, &action, nullptr);
  itimerval period{{0, 1000}, {0, 1000}};
  setitimer(ITIMER_REAL, &period, nullptr);
}
"""
MODEL = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=2048, hidden_size=128,
             intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512, tie_word_embeddings=True,
             hidden_act="silu", attention_bias=False, initializer_range=0.02)
TRAINING = ("--hf-model m --from-scratch --data-path data --split 90,10,0 --seq-length 128 --micro-batch-size 1 "
            "--global-batch-size 8 --train-iters 12 --lr 1e-3 --use-torch-fsdp2 --ckpt-format torch_dcp "
            "--eval-interval 6 --eval-iters 2 --save-interval 4 --async-save --overwrite-run --save save")
INSTRUCTIONS = {"all": {}, "avx2": dict(ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2",
                                        MKL_ENABLE_INSTRUCTIONS="AVX2", MEGASHARD_KERNELS="avx2")}


@pytest.fixture(scope="module")
def storm(folder):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    (folder / "storm.cpp").write_text(STORM)
    run(compiler, "-shared", "-fPIC", "-o", folder / "storm.so", folder / "storm.cpp")
    write_documents(folder / "data", [[(7 * i + 31 * j * j) % 2000 for j in range(400)] for i in range(40)])
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(MODEL))
    return folder / "storm.so"


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_storm_of_signals_changes_no_bit(folder, storm, instructions):
    def train(**variables):
        shutil.rmtree(folder / "save", ignore_errors=True)
        steps, _ = pretrain(folder, ranks=2, defaults=TRAINING, config=LAYERS, cwd=folder,
                            env=environment(**INSTRUCTIONS[instructions], **variables))
        return losses(steps), [step["grad_norm"] for step in steps], [step.get("validation_loss") for step in steps]

    quiet = train()
    assert len(quiet[0]) == 12
    assert train(LD_PRELOAD=str(storm)) == quiet
