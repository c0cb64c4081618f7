"""Trainings that stop and resume: at the same number of ranks, at others, from others' checkpoints, with every
option."""
import json
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import megashard
from megashard import LAYERS, NO_DROPOUT, TRACKER, USAGE, fsdp2_reference, losses, mock_samples, run, write_documents
from megatron_steps import as_torch_keeps_them, save_as_megatron, without_gpu

NETWORK = megashard.network(length=8)
LOOP = ("--micro-batch-size 1 --global-batch-size 12 --lr 1e-2 --weight-decay 0.1 --log-interval 1 --peak-tflops 1 "
        "--use-torch-fsdp2 --ckpt-format torch_dcp ")
MOCK = "--mock-data --eval-iters 0 "
SCHEDULE = "--lr-decay-iters 20 --lr-warmup-iters 2 "
DIST = ["--ckpt-format", "torch_dist"]


def pretrain(folder, *flags, sharding=None, network=NETWORK, schedule=SCHEDULE, data=MOCK, **options):
    config = LAYERS + (f"sharding_size: {sharding}\n" if sharding else "")
    return megashard.pretrain(folder, *flags, defaults=network + LOOP + data + schedule, config=config, **options)


def numbers(steps):
    return [(step["step"], step["loss"], step["grad_norm"], step["lr"], step["consumed_samples"]) for step in steps]


@pytest.fixture(scope="module")
def saved(folder):
    """Six steps with dropout, saved after 2, 4 and 6: the folder and the steps."""
    save = folder / "saved"
    return save, pretrain(folder, "--train-iters", 6, "--save", save, "--save-interval", 2)[0]


@pytest.fixture(scope="module")
def plain(folder):
    """Fourteen steps without dropout at two ranks, saved after 2 and more."""
    save = folder / "plain"
    return save, pretrain(folder, *NO_DROPOUT, "--train-iters", 14, "--save", save, "--save-interval", 2, ranks=2)[0]


@pytest.mark.parametrize("ranks, sharding, flags", [
    (3, None, ["--optimizer", "sgd"]), (4, 2, ["--bf16"]), (2, None, ["--optimizer", "muon", "--bf16"]),
    (1, None, ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"])])
def test_the_same_ranks_go_on_bit_for_bit(folder, ranks, sharding, flags):
    """Weights, optimizer, schedule, data and dropout, after a step that is asked for."""
    save = folder / f"same_{ranks}"
    straight, _ = pretrain(folder, "--train-iters", 6, "--save", save, "--save-interval", 4, *flags, ranks=ranks,
                           sharding=sharding)
    resumed, out = pretrain(folder, "--train-iters", 6, "--load", save, "--ckpt-step", 4, *flags, ranks=ranks,
                            sharding=sharding)
    assert numbers(resumed) == numbers(straight[4:])
    assert "dropout goes on" not in out and "checkpoint's differ" not in out


def test_other_ranks_and_shapes_go_on_within_rounding(folder, plain):
    """2 ranks, 1, 3, 2x2, 4, 2x2 again and 2: two steps each, from the step that the shape before saved."""
    load, straight = plain
    steps, step, before = straight[:2], 2, 2
    for ranks, sharding in [(1, None), (3, None), (4, 2), (4, None), (4, 2), (2, None)]:
        save = folder / f"elastic_{step}"
        more, out = pretrain(folder, *NO_DROPOUT, "--train-iters", 14, "--load", load, "--ckpt-step", step, "--save",
                             save, "--save-interval", 2, "--exit-interval", 2, ranks=ranks, sharding=sharding)
        assert ("ranks, and there are" in out) == (ranks != before), out
        steps += more
        load, step, before = save, step + 2, ranks
    assert [step["consumed_samples"] for step in steps] == [step["consumed_samples"] for step in straight]
    assert [step["lr"] for step in steps] == [step["lr"] for step in straight]
    for here, there in zip(steps, straight, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-6)  # sums run over other shares


def test_replicas_are_written_once(folder, plain):
    """2x2: every element is stored once, as many bytes as two ranks without replicas write, distributed over four."""
    save = folder / "replicas"
    pretrain(folder, "--train-iters", 1, "--save", save, "--save-interval", 1, ranks=4, sharding=2)

    def written(step):
        """The size of each file, and the bytes of the tensors in it."""
        metadata = dcp.FileSystemReader(step).read_metadata()
        tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        for key, entry in tensors.items():
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), key
        assert len(metadata.storage_data) == len(metadata.state_dict_metadata) + sum(
            len(entry.chunks) - 1 for entry in tensors.values())
        files = {path.name: path.stat().st_size for path in step.glob("*.distcp")}
        places = {(place.relative_path, place.offset): place.length for place in metadata.storage_data.values()}
        assert len(places) == len(metadata.storage_data) - 2  # two shards of the head lie where the embeddings' do
        assert sum(places.values()) == sum(files.values())
        return files, sum(place.length for index, place in metadata.storage_data.items() if index.fqn in tensors)

    files, tensor_bytes = written(save / "iter_0000001")
    assert tensor_bytes == written(plain[0] / "iter_0000002")[1]
    assert len(files) == 4 and min(files.values()) > 0.6 * max(files.values()), files


@pytest.mark.parametrize("ranks", [1, 4])
def test_megatrons_format_goes_on_at_other_ranks(folder, plain, ranks):
    """torch_dist, saved by two ranks."""
    _, straight = plain
    save = folder / "dist"
    if not save.exists():
        first, _ = pretrain(folder, *NO_DROPOUT, "--train-iters", 14, "--exit-interval", 3, "--save", save,
                            "--save-interval", 3, *DIST, ranks=2)
        assert numbers(first) == numbers(straight[:3])
        assert (save / "iter_0000003" / "metadata.json").exists()
    more, out = pretrain(folder, *NO_DROPOUT, "--train-iters", 14, "--exit-interval", 6, "--load", save, *DIST,
                         ranks=ranks)
    assert f"saved by 2 ranks, and there are {ranks}" in out
    assert [(step["step"], step["lr"], step["consumed_samples"]) for step in more] == [
        (step["step"], step["lr"], step["consumed_samples"]) for step in straight[3:6]]
    assert losses(more) == pytest.approx(losses(straight[3:6]), rel=1e-6)  # sums run over other shares


def test_fresh_parts(folder, saved):
    """Each option leaves out its part and nothing else."""
    save, straight = saved
    load = ["--load", save, "--ckpt-step", 4]
    tuned, _ = pretrain(folder, "--train-iters", 1, *load, "--finetune")
    assert [step["step"] for step in tuned] == [1]
    assert tuned[0]["consumed_samples"] == 12 and tuned[0]["lr"] == straight[0]["lr"]
    assert tuned[0]["loss"] < straight[0]["loss"]
    fresh, _ = pretrain(folder, "--train-iters", 6, *load, "--no-load-optim")
    assert [step["step"] for step in fresh] == [5, 6]
    assert fresh[0]["loss"] == straight[4]["loss"]  # weights, data and dropout
    assert fresh[0]["lr"] == straight[0]["lr"] and fresh[1]["loss"] != straight[5]["loss"]
    other, out = pretrain(folder, "--train-iters", 6, *load, "--no-load-rng")
    assert losses(other)[0] != straight[4]["loss"] and other[0]["lr"] == straight[4]["lr"]
    assert "dropout goes on" not in out


def test_parts_that_were_not_saved(folder):
    save = folder / "weights"
    pretrain(folder, "--train-iters", 2, "--save", save, "--save-interval", 2, "--no-save-optim", "--no-save-rng")
    _, out = pretrain(folder, "--train-iters", 3, "--load", save, expect=USAGE)
    assert "missing keys" in out and "--no-load-optim starts with a fresh optimizer" in out
    resumed, out = pretrain(folder, "--train-iters", 3, "--load", save, "--no-load-optim")
    assert [step["consumed_samples"] for step in resumed] == [36]
    assert "no random states for these devices: dropout goes on from seed, iteration and rank" in out


def test_another_network_is_refused(folder, saved):
    save, straight = saved
    _, out = pretrain(folder, "--train-iters", 8, "--load", save, "--num-layers", 3, expect=USAGE)
    assert "has num_layers 2, and this run has 3: give --num-layers 2, or --use-checkpoint-args" in out
    _, out = pretrain(folder, "--train-iters", 8, "--load", save, "--finetune", "--hidden-size", 32, expect=1)
    assert "has sizes [128, 16] in" in out and "and [128, 32] here" in out
    taken, out = pretrain(folder, "--train-iters", 6, "--load", save, "--ckpt-step", 4, "--use-checkpoint-args",
                          network="")
    assert "num_layers 2" in out
    assert numbers(taken) == numbers(straight[4:])


def test_partial_loads(folder, saved):
    """Norms of queries and keys: their weights are missing, and are only left at their first values when that is asked
    for."""
    save, _ = saved
    flags = ["--train-iters", 1, "--load", save, "--finetune", "--qk-layernorm"]
    _, out = pretrain(folder, *flags, expect=USAGE)
    assert "missing keys (8): model.model.layers.0.self_attn.k_norm.bias" in out
    assert "--dist-ckpt-strictness log_all" in out
    steps, out = pretrain(folder, *flags, "--dist-ckpt-strictness", "log_all")
    assert "WARNING: missing keys (8): model.model.layers.0.self_attn.k_norm.bias" in out
    assert "they keep their first values" in out
    assert 3.5 < steps[0]["loss"] < 6  # first values, not whatever the memory held


def test_the_schedule(folder, saved):
    save, straight = saved
    load = ["--train-iters", 6, "--load", save, "--ckpt-step", 4, "--min-lr", "1e-3"]
    _, out = pretrain(folder, *load, expect=USAGE)  # before a weight is read
    assert "min_lr is 0.001 by the flags, but 0.0 in the checkpoint" in out
    kept, _ = pretrain(folder, *load, "--use-checkpoint-opt_param-scheduler")
    assert numbers(kept) == numbers(straight[4:])
    new, out = pretrain(folder, *load, "--override-opt_param-scheduler")
    assert new[0]["lr"] > straight[4]["lr"]
    assert "the flags of this run count where the checkpoint's differ: min_lr 0.0 -> 0.001" in out
    _, out = pretrain(folder, *load, "--use-checkpoint-opt_param-scheduler", "--no-load-optim")
    assert "the checkpoint's differ: min_lr 0.0 -> 0.001" in out  # its schedule is not loaded


def test_a_batch_that_does_not_divide_is_refused_before_loading(folder, saved):
    save, _ = saved
    _, out = pretrain(folder, "--train-iters", 8, "--load", save, ranks=5, expect=USAGE)
    assert "global batch size 12 is not divisible by 5" in out and "number of ranks" in out and "loading" not in out


def test_a_ramp_goes_on_at_more_ranks(folder):
    """Batches of 2, 2, 4, 6, 8 and then 12: a step is saved before each larger one, as Megatron does."""
    save = folder / "ramp"
    flags = [*NO_DROPOUT, "--rampup-batch-size", 2, 2, 20, "--train-samples", 60]
    samples = "--lr-decay-samples 200"
    straight, _ = pretrain(folder, *flags, "--save", save, "--save-interval", 100, schedule=samples)
    assert [step["global_batch_size"] for step in straight] == [2, 2, 4, 6, 8, 12, 12, 12]
    assert sorted(int(path.name[5:]) for path in save.glob("iter_*")) == [2, 3, 4, 5, 8]
    load = [*flags, "--load", save, "--ckpt-step"]
    _, out = pretrain(folder, *load, 2, ranks=4, schedule=samples, expect=USAGE)
    assert "global batch size 6 is not divisible by 4" in out
    resumed, _ = pretrain(folder, *load, 4, ranks=4, schedule=samples)
    assert [step["consumed_samples"] for step in resumed] == [step["consumed_samples"] for step in straight[4:]]
    assert losses(resumed) == pytest.approx(losses(straight[4:]), rel=1e-6)  # sums run over other shares


def test_a_finished_run_starts_and_ends(folder):
    """Its data has no sample left, nor has that of evaluations which an earlier run made more often."""
    for name in ("one", "two"):
        write_documents(folder / name, 20 * [range(40)])
    blend = f"--data-path 0.5 {folder / 'one'} 0.5 {folder / 'two'} --split 60,40,0 --eval-iters 1 "
    save = folder / "finished"
    flags = [*NO_DROPOUT, "--train-iters", 4, "--save", save, "--load", save, "--save-interval", 4]
    pretrain(folder, *flags, "--exit-interval", 3, "--eval-interval", 1, data=blend)
    last, out = pretrain(folder, *flags, "--eval-interval", 4, data=blend)
    assert [step["step"] for step in last] == [4] and "validation loss at iteration 4 on validation set" in out
    before = (save / "iter_0000004" / "__0_0.distcp").stat().st_mtime_ns
    none, out = pretrain(folder, *flags, "--eval-interval", 4, data=blend)
    assert not none and "validation loss at iteration 4 on validation set" in out
    assert (save / "iter_0000004" / "__0_0.distcp").stat().st_mtime_ns == before  # and is not saved again
    pretrain(folder, *NO_DROPOUT, "--train-iters", 4, "--load", save, "--save", folder / "elsewhere",
             "--save-interval", 4, data=blend)
    assert (folder / "elsewhere" / "iter_0000004").exists()


def test_steps_of_others(folder, plain):
    """Steps of PyTorch's DCP without Megatron's entries, and a release of weights as converters write it."""
    save, straight = plain
    whole = folder / "whole.pt"
    dcp_to_torch_save(str(save / "iter_0000002"), str(whole))
    state = torch.load(whole, weights_only=False)
    theirs = folder / "pytorch"
    dcp.save({"model": state["model"], "optimizer": state["optimizer"]}, checkpoint_id=theirs / "iter_0000002",
             no_dist=True)
    (theirs / TRACKER).write_text("2")
    resumed, out = pretrain(folder, *NO_DROPOUT, "--train-iters", 4, "--load", theirs, ranks=2)
    assert numbers(resumed) == numbers(straight[2:4])
    assert "2 steps of these flags' batch are 24" in out and "the checkpoint has no schedule: it goes on from 24" in out

    release = folder / "release"
    dcp.save({"model": state["model"], "checkpoint_version": 3.0}, checkpoint_id=release / "release", no_dist=True)
    (release / TRACKER).write_text("release")
    first, out = pretrain(folder, *NO_DROPOUT, "--train-iters", 1, "--load", release)
    tuned, _ = pretrain(folder, *NO_DROPOUT, "--train-iters", 1, "--load", save, "--ckpt-step", 2, "--finetune")
    assert numbers(first) == numbers(tuned) and "loading release checkpoint from" in out


STEPS, STOP, WORDS = 8, 4, 100


def test_a_step_that_pytorch_trained(folder):
    """Two FSDP2 ranks of PyTorch train a model with tied weights, save model and optimizer by DCP and train on; we go
    on from their step, at 1, 2 and 4 ranks, with their losses."""
    import transformers

    model, theirs = folder / "llama", folder / "fsdp2"
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 1, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2, bos_token_id=None, eos_token_id=WORDS,
        tie_word_embeddings=True)
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    tokens = mock_samples(folder, STEPS * 4, length=16, vocabulary=WORDS + 1, end=WORDS).view(STEPS, 4, 17)
    from safetensors.torch import load_file, save_file

    save_file({"tokens": tokens}, folder / "batches.safetensors")
    case = dict(output=str(folder / "theirs.safetensors"), model=str(model),
                batches=str(folder / "batches.safetensors"), mesh=[2], steps=STEPS, optimizer="adam", lr=1e-3,
                weight_decay=0.1, clip=1.0, wrapper="fsdp2", save=str(theirs / f"iter_{STOP:07d}"), save_after=STOP)
    (folder / "case.json").write_text(json.dumps([case]))
    fsdp2_reference(folder / "case.json")
    (theirs / TRACKER).write_text(str(STOP))
    expected = load_file(folder / "theirs.safetensors")
    flags = ["--train-iters", STEPS, "--load", theirs, "--global-batch-size", 4, "--lr", "1e-3"]
    for ranks in (1, 2, 4):
        more, out = pretrain(folder, *flags, ranks=ranks, network=f"--hf-model {model} --seq-length 16 ",
                             schedule="--lr-decay-style constant")
        assert [step["step"] for step in more] == list(range(STOP + 1, STEPS + 1)), out
        assert losses(more) == pytest.approx(expected["loss"][STOP:].tolist(), rel=1e-6)  # other kernels
        norms = [step["grad_norm"] for step in more]
        assert norms == pytest.approx(expected["grad_norm"][STOP:].tolist(), rel=1e-5)


def test_ranks_of_a_sequence_draw_alike(folder):
    """--data-parallel-random-init counts data parallel ranks, as Megatron."""
    save = folder / "drawn_by_sequence"
    pretrain(folder, *NO_DROPOUT, "--train-iters", 1, "--save", save, "--save-interval", 1,
             "--data-parallel-random-init", "--context-parallel-size", 2, ranks=4)
    dcp_to_torch_save(str(save / "iter_0000001"), str(folder / "drawn_by_sequence.pt"))
    states = torch.load(folder / "drawn_by_sequence.pt", weights_only=False)["rng_state"]
    each = [as_torch_keeps_them(states[str(rank)])["torch_rng_state"] for rank in range(4)]
    assert [torch.equal(each[0], other) for other in each] == [True, True, False, False]
    assert torch.equal(each[2], each[3])


@pytest.mark.slow  # imports megatron-core again and again
def test_random_states_of_megatron(folder):
    """As torch.get_rng_state() returns them: a list over ranks in torch_dcp and in torch_dist, or one entry for all
    ranks."""
    save = folder / "drawn"
    flags = ["--train-iters", 4, "--data-parallel-random-init"]  # ranks draw apart
    straight, _ = pretrain(folder, *flags, "--save", save, "--save-interval", 2, ranks=2)
    dcp_to_torch_save(str(save / "iter_0000002"), str(folder / "drawn.pt"))
    state = torch.load(folder / "drawn.pt", weights_only=False)
    ours = state["rng_state"]
    each = [as_torch_keeps_them(ours[str(rank)]) for rank in range(2)]

    def save_step(name, states, form="torch_dcp"):
        step = folder / name / "iter_0000002"
        if form == "torch_dcp":
            dcp.save({**state, "rng_state": states}, checkpoint_id=step, no_dist=True)
        else:
            step.mkdir(parents=True)
            torch.save({**state, "rng_state": states}, folder / "whole.pt")
            run(sys.executable, __file__, folder / "whole.pt", step)
        (step.parent / TRACKER).write_text("2")
        return step.parent

    for form in ("torch_dcp", "torch_dist"):
        load = [*flags, "--load", save_step(f"by_rank_{form}", each, form), "--ckpt-format", form]
        more, out = pretrain(folder, *load, ranks=2)
        assert numbers(more) == numbers(straight[2:]) and "dropout goes on" not in out
    other, out = pretrain(folder, *load, ranks=4)
    assert "saved by 2 ranks, and there are 4: dropout goes on from seed, iteration and rank" in out
    shared, _ = pretrain(folder, *flags, "--load", save_step("shared", each[:1]), ranks=2)
    twice, _ = pretrain(folder, *flags, "--load", save_step("twice", [each[0], each[0]]), ranks=2)
    assert numbers(shared) == numbers(twice) != numbers(straight[2:])
    del state["args"]
    _, out = pretrain(folder, *flags, "--load", save_step("unsaid", each), ranks=2)
    assert "does not say how many ranks saved its random states: dropout goes on" in out


def test_a_missing_checkpoint(folder):
    empty = folder / "empty"
    empty.mkdir()
    _, out = pretrain(folder, "--train-iters", 1, "--load", empty)
    assert "will not load any checkpoints and will start from random" in out
    _, out = pretrain(folder, "--train-iters", 1, "--load", empty, "--exit-on-missing-checkpoint", expect=USAGE)
    assert "--exit-on-missing-checkpoint" in out and "nothing to load" in out


if __name__ == "__main__":
    without_gpu()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    save_as_megatron(*sys.argv[1:])
