"""New tokens a second of `megashard generate` with keys and values kept, and with the whole text for each token.

    generation.py [--repeats 3] [--new-tokens 256] [--prompt 32] [--batch 1]

The 8 M model of run.py on one rank in fp32. Without a cache it is the same model with dynamic positions, which only
turn otherwise beyond max_position_embeddings: the tokens are the same.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from megashard import PROGRAM, run  # noqa: E402
from run import make_data, make_model  # noqa: E402


def measure(args, folder, name):
    done = run(PROGRAM, "generate", "--hf-model", folder / name, "--data-path", folder / "prompts", "--seq-length",
               args.prompt + args.new_tokens, "--micro-batch-size", args.batch, "--max-new-tokens", args.new_tokens,
               "--output", folder / name / "answers", timeout=3600)
    return float(re.search(r"tokens, (\d+) a second", done.stdout).group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in {"--repeats": 3, "--new-tokens": 256, "--prompt": 32, "--batch": 1}.items():
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        make_model(folder / "kept")
        config = json.loads((folder / "kept" / "config.json").read_text())
        config["rope_parameters"] = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
        (folder / "recomputed").mkdir()
        (folder / "recomputed" / "config.json").write_text(json.dumps(config))
        (folder / "recomputed" / "model.safetensors").symlink_to(folder / "kept" / "model.safetensors")
        make_data(folder / "prompts", 4096, count=args.batch * args.prompt, document=args.prompt)
        runs = {"kept": [], "recomputed": []}
        for _ in range(args.repeats):
            for name, figures in runs.items():
                figures.append(measure(args, folder, name))
        tokens = [load_file(folder / name / "answers.vision.safetensors")["tokens"] for name in runs]
    ratios = sorted(fast / slow for fast, slow in zip(*runs.values()))
    kept, recomputed = (statistics.median(figures) for figures in runs.values())
    print(f"tokens/s {kept:.0f} kept, {recomputed:.0f} recomputed, ratio "
          f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} .. {ratios[-1]:.1f}); "
          f"{'the same' if tokens[0].equal(tokens[1]) else 'other'} tokens")


if __name__ == "__main__":
    main()
