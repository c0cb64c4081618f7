"""A small Qwen3.5 from its first step to its export, beside transformers: tests/long/small_qwen3_5."""
import argparse
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import time

import numpy
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers

from megashard import PREPROCESS, ROOT, launch, run, write_documents

sys.path.insert(0, str(ROOT / "launch" / "first_run"))
from check_first_loss import first_batch, read_documents  # noqa: E402

RANKS, BATCH, LENGTH, EVAL_ITERS, SEED = 2, 8, 256, 10, 1234
FULL = 400  # steps from which the loss must be far below the unigram entropy
END_OF_TEXT, VOCABULARY = "<|endoftext|>", 4096  # of NETWORK
NETWORK = ROOT / "tests" / "benchmarks" / "networks" / "qwen3_5_30m" / "config.json"
PROMPT = "And the LORD said unto Moses,"
CHECKS = []


def check(what, holds):
    CHECKS.append(holds)
    print(f"{'passed' if holds else 'FAILED'}: {what}", flush=True)


def write_text(folder):
    """A chapter is a document; every twentieth is held out."""
    chapters = {}
    for line in run("bible", "-f", "Gen1:1-Rev22:21").stdout.splitlines():
        place, verse = line.split(" ", 1)
        chapters.setdefault(place.split(":")[0], []).append(verse)
    documents = ["\n".join(verses) for verses in chapters.values()]
    held_out = documents[19::20]
    del documents[19::20]
    for name, each in {"train": documents, "held_out": held_out}.items():
        (folder / f"{name}.txt").write_text("\n\n".join(each) + "\n")


def write_model(folder, text):
    """config.json without weights, and a tokenizer of byte pairs."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train([str(text)], tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    end = tokenizer.token_to_id(END_OF_TEXT)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
    config = json.loads(NETWORK.read_text()) | {"eos_token_id": end, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def unigram_entropy(train, held_out):
    """Nats a token of the held-out text by the frequencies of tokens in the other."""
    counts = numpy.bincount(train, minlength=VOCABULARY) + 1.0
    return float(-numpy.log(counts / counts.sum())[held_out].mean())


class Trainings:
    """`megashard pretrain` with the flags that all have in common; logs and metrics lie in the folder."""

    def __init__(self, folder, steps, deadline):
        self.folder, self.steps, self.deadline = folder, steps, deadline
        bf16 = "param_dtype: bf16\nreduce_dtype: fp32\n"
        for name, precision in {"fp32": "", "bf16": bf16}.items():
            (folder / f"{name}.yaml").write_text("sub_modules_to_wrap: ['model.layers.{*}']\n" + precision)

    def run(self, name, *flags, steps=None, lr=1.5e-3, dtype="bf16"):
        """Returns the metrics' lines and the output."""
        steps = steps or self.steps
        metrics, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        words = launch(
            RANKS, "pretrain", "--train-data-path", self.folder / "train_text_document", "--valid-data-path",
            self.folder / "held_out_text_document", "--use-torch-fsdp2", "--fsdp2-config-path",
            self.folder / f"{dtype}.yaml", "--ckpt-format", "torch_dcp", "--tokenizer-type", "HuggingFaceTokenizer",
            "--tokenizer-model", self.folder / "hf", "--seed", SEED, "--seq-length", LENGTH,
            "--micro-batch-size", BATCH // RANKS, "--global-batch-size", BATCH, "--train-iters", steps,
            "--lr", lr, "--min-lr", lr / 10, "--lr-decay-style", "cosine", "--lr-warmup-iters", steps // 12,
            "--adam-beta2", 0.95, "--weight-decay", 0.1, "--clip-grad", 1.0, "--eval-iters", EVAL_ITERS,
            "--eval-interval", steps, "--log-interval", max(steps // 12, 1), "--log-tokens-per-second",
            "--metrics-file", metrics, *flags)
        with log.open("w") as output:
            subprocess.run([str(word) for word in words], check=True, timeout=self.deadline, stdout=output,
                           stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line) for line in lines], log.read_text()


def losses_of(log):
    """The validation losses of a log, in their order."""
    return [float(found) for found in re.findall(r"validation loss at .*?lm loss value: (\S+)", log)]


@torch.no_grad()
def log_probs_of(model, rows):
    """[rows, length]: transformers' log-probability of each token but the first."""
    found = []
    for each in torch.from_numpy(rows).split(BATCH):
        of_all = model(each[:, :-1]).logits.log_softmax(-1)
        found.append(of_all.gather(2, each[:, 1:, None]).squeeze(2))
    return torch.cat(found).double().numpy()


def megashards_log_probs(folder, export, rows):
    write_documents(folder / "rows", rows)
    run(*launch(RANKS, "infer", "--hf-model", export, "--data-path", folder / "rows", "--seq-length", LENGTH,
                "--micro-batch-size", BATCH, "--log-probs", folder / "log_probs.npy", "--use-torch-fsdp2",
                "--fsdp2-config-path", folder / "fp32.yaml"), timeout=900)
    return numpy.load(folder / "log_probs.npy").astype(numpy.float64)


def near(a, b):
    return abs(a - b) <= 1e-5 * abs(b)  # sums of fp32 in another order


def train(runs, folder):
    """Trains to the end and, from a checkpoint on the way, once more; returns the uninterrupted run's metrics and the
    export."""
    export, again, saved_at = folder / "export", folder / "export_again", runs.steps - max(runs.steps // 20, 2)
    begin = time.monotonic()
    print(f"training {runs.steps} steps of {BATCH} x {LENGTH} tokens on {RANKS} ranks; log: {folder}/whole.log",
          flush=True)
    whole, log = runs.run("whole", "--from-scratch", "--hf-model", folder / "hf", "--save", folder / "save",
                          "--save-interval", saved_at, "--save-hf", export)
    minutes = (time.monotonic() - begin) / 60
    parameters = int(re.search(r"number of parameters on .*?: (\d+)", log)[1])
    print(f"{parameters:,} parameters; {len(whole)} steps in {minutes:.1f} minutes: loss {whole[0]['loss']:.4f}, then "
          + ", ".join(f"{step['loss']:.4f}" for step in whole[::max(runs.steps // 6, 1)][1:])
          + f", {whole[-1]['loss']:.4f}")
    print(f"its own evaluations, in bf16: {losses_of(log)}")
    resumed, _ = runs.run("resumed", "--hf-model", folder / "hf", "--load",
                          folder / "save" / f"iter_{saved_at:07}", "--save-hf", again)
    check(f"{len(resumed)} steps from the checkpoint of step {saved_at}: losses and gradient norms of the "
          "uninterrupted run",
          [[step[key] for key in ("step", "loss", "grad_norm", "lr")] for step in resumed] ==
          [[step[key] for key in ("step", "loss", "grad_norm", "lr")] for step in whole[saved_at:]])
    weights = [sorted(each.glob("*.safetensors")) for each in (export, again)]
    check("their exports have the same bytes",
          weights[0] != [] and [each.read_bytes() for each in weights[0]] == [each.read_bytes() for each in weights[1]])
    return whole, export


def show(folder, steps, deadline):
    write_text(folder)
    write_model(folder / "hf", folder / "train.txt")
    documents = {}
    for name in ("train", "held_out"):
        run(sys.executable, PREPROCESS / "preprocess_data.py", "--input", folder / f"{name}.txt", "--input-format",
            "text", "--output-prefix", folder / name, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model",
            folder / "hf", "--append-eod")
        documents[name] = read_documents(str(folder / f"{name}_text_document"))
    tokens = {name: numpy.concatenate(each) for name, each in documents.items()}
    print(f"{len(tokens['train']):,} tokens to train on, {len(tokens['held_out']):,} held out, of {VOCABULARY}")
    unigram = unigram_entropy(tokens["train"], tokens["held_out"])

    runs = Trainings(folder, steps, deadline)
    _, export = train(runs, folder)

    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    rows = first_batch(documents["held_out"], LENGTH, EVAL_ITERS * BATCH, SEED)  # what an evaluation reads
    theirs = log_probs_of(model, rows)
    loss = -float(theirs.mean())
    evaluated = losses_of(runs.run("evaluated", "--hf-model", export, "--skip-train", dtype="fp32")[1])[0]
    check(f"held-out loss of {rows.size - len(rows):,} tokens: {evaluated:.6f} here, {loss:.6f} by transformers from "
          f"the export ({abs(evaluated - loss) / loss:.1e})", near(evaluated, loss))
    ours = megashards_log_probs(folder, export, rows)
    check(f"`megashard infer`: {-ours.mean():.6f}; the largest difference of a log-probability is "
          f"{abs(ours - theirs).max():.1e} (of {abs(theirs).max():.0f})",
          near(ours.mean(), theirs.mean()) and abs(ours - theirs).max() <= 1e-5 * abs(theirs).max())
    print(f"unigram entropy: {unigram:.4f}; e^loss: {math.exp(unigram):.0f} by unigrams, {math.exp(loss):.1f} now")
    if steps >= FULL:
        check("the loss is far below it", loss < unigram - 1.5)

    on, log = runs.run("on", "--hf-model", export, steps=12, lr=1e-4, dtype="fp32")
    batch = first_batch(documents["train"], LENGTH, BATCH, SEED)
    first = -float(log_probs_of(model, batch).mean())
    check(f"training from the export begins at {on[0]['loss']:.6f}; transformers: {first:.6f}",
          near(on[0]["loss"], first))
    after = losses_of(log)[0]
    check(f"and has a held-out loss of {after:.4f} after {len(on)} steps", after < loss + 0.02)

    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    new = model.generate(**prompt, max_new_tokens=60, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(f"transformers goes on from the export: {tokenizer.decode(new[0], skip_special_tokens=True)!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "run" / "small_qwen3_5")
    parser.add_argument("--deadline", type=float, default=7200)
    args = parser.parse_args()
    if args.steps < 12:
        parser.error("--steps takes at least 12")
    shutil.rmtree(args.output, ignore_errors=True)
    (args.output / "hf").mkdir(parents=True)
    begin = time.monotonic()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    show(args.output, args.steps, args.deadline)
    print(f"took {(time.monotonic() - begin) / 60:.1f} minutes")
    print(f"{sum(CHECKS)} passed, {CHECKS.count(False)} failed")
    sys.exit(0 if all(CHECKS) else 1)


if __name__ == "__main__":
    main()
