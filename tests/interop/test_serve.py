"""`megashard serve`: losses that its client computes train as those of `megashard pretrain`."""
import concurrent.futures
import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)

import megashard
from conversations import write_conversation_set
from documented import blocks_run_by

WORDS, PAIRS, STEPS, BETA, LENGTH = 60, 12, 5, 0.4, 24
SIZES = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3)
TRAINING = (f"--seq-length {LENGTH} --micro-batch-size 4 --global-batch-size 8 --train-iters {STEPS} --lr 2e-3 "
            "--min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1 " + megashard.RUN)


def package():
    """The Python package, whose name is this folder's module's, too."""
    folder = megashard.ROOT / "launch" / "python" / "megashard"
    spec = importlib.util.spec_from_file_location("door", folder / "__init__.py",
                                                  submodule_search_locations=[str(folder)])
    sys.modules["door"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module("door.server")


server = package()


@pytest.fixture(scope="module")
def pairs(folder):
    """A model, and chosen and rejected answers in turn with a reference's log-probabilities, as a set of
    conversations. Returns tokens, masks and log-probabilities of each answer."""
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder / "model")
    (folder / "fsdp2.yaml").write_text(megashard.LAYERS)
    rows = []
    for _ in range(PAIRS):
        prompt = torch.randint(1, WORDS, (int(torch.randint(2, 8, ())),)).tolist()
        for _ in range(2):
            answer = torch.randint(1, WORDS, (int(torch.randint(2, 9, ())),)).tolist()
            rows.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    reference = [torch.randn(len(tokens)) - 4 for tokens, _ in rows]
    write_conversation_set(folder / "pairs", [tokens for tokens, _ in rows], [mask for _, mask in rows],
                           ref_log_probs=torch.cat(reference))
    return [(tokens, torch.tensor(mask[1:]), of[1:]) for (tokens, mask), of in zip(rows, reference)]


@contextlib.contextmanager
def serving(folder, *flags, ranks=1, sharing=1, expect=0, stops=True, model="model"):
    """The clients of a server, which must end with that exit code after the block; then also what it has printed.
    stops: False if the block has a client of its own, and stops the server."""
    socket = folder / "socket"
    command = megashard.launch(ranks, "serve", socket, *megashard.with_defaults(flags, TRAINING), "--hf-model",
                               folder / model, "--fsdp2-config-path", folder / "fsdp2.yaml")
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL, text=True, env=megashard.environment())
    clients = []
    try:
        clients += [server.Client(socket, rank, timeout=60) for rank in range(ranks // sharing if stops else 0)]
        for client in clients:
            client.server = process
        yield clients
        if expect == 0 and stops:
            on_all(clients, lambda client, rank: client.stop())
        out, _ = process.communicate(timeout=60)
        assert process.returncode == expect, out[-3000:]
        clients.append(out)
        assert not list(folder.glob("socket.*"))
    finally:
        process.kill()
        process.wait()


def on_all(clients, work):
    """work(client, rank) of each at once, as the commands wait for each other."""
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
        return list(threads.map(work, clients, range(len(clients))))


def dpo_loss(log_probs, rows):
    """The mean over the pairs of TRL's sigmoid loss."""
    sums = torch.stack([((now - of) * mask).sum() for now, (_, mask, of) in zip(log_probs, rows, strict=True)])
    return -torch.nn.functional.logsigmoid(BETA * (sums[::2] - sums[1::2])).mean()


def trained_by_dpo(clients, pairs, at_once=False):
    """Loss and gradient norm of each step on micro batches of four rows. at_once: by forward_backward()."""
    def rows_of(step, rank, ranks):
        for part in range(rank, 2, ranks):
            first = 8 * step + 4 * part
            yield [pairs[(first + i) % len(pairs)] for i in range(4)]

    def step_of(client, rank, step):
        losses, count = [], 2 // len(clients)
        for rows in rows_of(step, rank, len(clients)):
            tokens, lengths = server.flat([row[0] for row in rows])
            found = client.forward(tokens, lengths, keep=not at_once)["log_probs"]
            leaf = torch.from_numpy(found.copy()).requires_grad_()
            loss = dpo_loss([each[:-1] for each in leaf.split(lengths.tolist())], rows)
            (loss / count).backward()
            if at_once:
                client.forward_backward(tokens, lengths, leaf.grad)
            else:
                client.backward(leaf.grad)
            losses.append(loss.item())
        return {"loss": np.mean(losses), **client.step()}

    seen = []
    for step in range(STEPS):
        of_ranks = on_all(clients, lambda client, rank: step_of(client, rank, step))
        seen.append(of_ranks[0] | {"loss": np.mean([each["loss"] for each in of_ranks])})
    return seen


@pytest.mark.parametrize("ranks, sharing, more, ways", [
    (1, 1, "", [False, True]), (2, 1, "", [False]), (2, 2, "--context-parallel-size 2", [True]),
    (2, 2, "--tensor-model-parallel-size 2", [False]), (2, 1, "--device sim", [True])])
def test_trains_as_the_objective_dpo(folder, pairs, ranks, sharing, more, ways):
    steps, _ = megashard.pretrain(
        folder, "--hf-model", folder / "model", "--data-path", folder / "pairs", "--split", "1,0,0",
        "--no-shuffle-conversations", "--objective", "dpo", "--dpo-beta", BETA, "--peak-tflops", 1, "--log-interval", 1,
        "--loss-by-weights", *more.split(), ranks=ranks, defaults=TRAINING)
    for at_once in ways:
        with serving(folder, *more.split(), ranks=ranks, sharing=sharing) as clients:
            served = trained_by_dpo(clients, pairs, at_once)
        for ours, theirs in zip(served, steps, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-12)


def network(folder):
    return Qwen3ForCausalLM.from_pretrained(folder / "model").float()


def test_numbers_of_a_forward_are_those_of_transformers(folder, pairs):
    """Log-probabilities, entropies at the tokens' temperatures, and the gradient of a loss of both; packed or not."""
    rows = [pairs[i][0] for i in range(5)]
    tokens, lengths = server.flat(rows)
    draw = torch.Generator().manual_seed(3)
    temperatures = torch.rand(len(tokens), generator=draw) + 0.5
    of_log_probs, of_entropies = torch.randn(2, len(tokens), generator=draw)
    model = network(folder)
    log_probs, entropies, loss = torch.zeros(len(tokens)), torch.zeros(len(tokens)), 0
    for end, row in zip(lengths.cumsum(), rows):
        part = slice(int(end) - len(row), int(end) - 1)
        logits = model(torch.tensor([row])).logits[0, :-1] / temperatures[part, None]
        every = logits.log_softmax(-1)
        now, spread = every.gather(1, torch.tensor(row[1:])[:, None])[:, 0], -(every.exp() * every).sum(-1)
        loss = loss + (of_log_probs[part] * now).sum() + (of_entropies[part] * spread).sum()
        log_probs[part], entropies[part] = now.detach(), spread.detach()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for more in ([], ["--neat-packing", "--seq-length", 64]):
        with serving(folder, *more) as (client,):
            seen = client.forward(tokens, lengths, temperatures=temperatures, entropies=True, keep=True)
            client.forward(tokens, lengths, keep=True)  # the one before is given up
            kept = client.forward(tokens, lengths, temperatures=temperatures, entropies=True, keep=True)
            client.backward(of_log_probs, entropy_weights=of_entropies)
            assert client.step(lr=0)["grad_norm"] == pytest.approx(norm, rel=2e-5)
            again = client.forward_backward(tokens, lengths, of_log_probs, entropy_weights=of_entropies,
                                            temperatures=temperatures)
            assert client.step()["grad_norm"] == pytest.approx(norm, rel=2e-5)
            for found in (seen, kept, again):
                np.testing.assert_allclose(found["log_probs"], log_probs, atol=2e-5)
                np.testing.assert_allclose(found["entropies"], entropies, atol=2e-5)


def test_saves_and_loads(folder, pairs):
    """A step after a load is that after the save; the weights are transformers'."""
    tokens, lengths = server.flat([pairs[0][0], pairs[1][0]])
    weights = np.ones(len(tokens), np.float32)
    with serving(folder, "--publish-weights", folder / "published", ranks=2) as clients:
        def step(client, _=0):
            before = client.forward_backward(tokens, lengths, weights)["log_probs"]
            return before, client.step()["grad_norm"]
        on_all(clients, step)
        on_all(clients, lambda client, _: client.save(folder / "kept"))
        first = on_all(clients, step)[0]
        on_all(clients, lambda client, _: client.save_weights(folder / "out"))
        assert on_all(clients, lambda client, _: client.load(folder / "kept")) == [1, 1]
        second = on_all(clients, step)[0]
        np.testing.assert_array_equal(first[0], second[0])
        assert first[1] == second[1]
        now = on_all(clients, lambda client, _: client.forward(tokens, lengths))[0]["log_probs"]
    with serving(folder, "--load", folder / "kept") as (client,):
        assert client.step_number == 1
        np.testing.assert_allclose(step(client)[0], first[0], atol=1e-5)
    model = Qwen3ForCausalLM.from_pretrained(folder / "out").float()
    every = model(torch.tensor([pairs[0][0]])).logits[0, :-1].log_softmax(-1)
    theirs = every.gather(1, torch.tensor(pairs[0][0][1:])[:, None])[:, 0].detach()
    np.testing.assert_allclose(now[:len(theirs)], theirs, atol=2e-5)
    assert (folder / "published" / "step_2" / "STABLE").exists()


def test_adapters_are_left_out_for_the_base(folder, pairs):
    tokens, lengths = server.flat([pairs[0][0], pairs[1][0]])
    with serving(folder, "--lora-r", 2, "--lora-target-modules", "all-linear") as (client,):
        first = client.forward(tokens, lengths)["log_probs"]
        for _ in range(2):
            client.forward_backward(tokens, lengths, np.ones(len(tokens)))
            client.step(lr=0.01)
        assert np.abs(client.forward(tokens, lengths)["log_probs"] - first).max() > 1e-3
        np.testing.assert_array_equal(client.forward(tokens, lengths, base=True)["log_probs"], first)
        client.save_weights(folder / "adapter", adapters=True)
    assert (folder / "adapter" / "adapter_model.safetensors").exists()


def test_values_of_a_score_head(folder, pairs):
    rows = [pairs[i][0] for i in range(3)]
    tokens, lengths = server.flat(rows)
    model = Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1)).float()
    model.save_pretrained(folder / "critic")
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(2))
    values = [model.score(model.model(torch.tensor([row[:-1]])).last_hidden_state)[0, :, 0] for row in rows]
    sum((each * part[:-1]).sum() for each, part in zip(values, weights.split(lengths.tolist()))).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    with serving(folder, model="critic") as (client,):
        found = client.forward(tokens, lengths, keep=True)["values"]
        client.backward(value_weights=weights)
        assert client.step()["grad_norm"] == pytest.approx(norm, rel=2e-5)
    for each, part in zip(values, np.split(found, lengths.cumsum()[:-1])):
        np.testing.assert_allclose(part, [*each.tolist(), 0], atol=2e-5)


def test_terms_of_the_model_are_added(folder, pairs):
    """The balance of a router's experts, as in a training on the next token."""
    Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.5)).save_pretrained(folder / "experts")
    steps, _ = megashard.pretrain(
        folder, "--hf-model", folder / "experts", "--data-path", folder / "pairs", "--split", "1,0,0", "--train-iters",
        2, "--no-shuffle-conversations", "--peak-tflops", 1, "--log-interval", 1, defaults=TRAINING)
    with serving(folder, "--train-iters", 2, model="experts") as (client,):
        for step in steps:
            for part in range(2):
                rows = [pairs[8 * (step["step"] - 1) + 4 * part + i] for i in range(4)]
                tokens, lengths = server.flat([row[0] for row in rows])
                counted = torch.cat([torch.cat([mask, torch.zeros(1)]) for _, mask, _ in rows])
                found = client.forward_backward(tokens, lengths, -counted / counted.sum() / 2, aux=0.5)
                assert found["aux.load_balancing_loss"] > 0
            assert client.step()["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)


WRONG = {
    "token 1 is 60, outside the vocabulary of 60": ("forward", {"tokens": [1, WORDS, 3], "lengths": [3]}, {}),
    '"lengths" add up to 4, and there are 3 tokens': ("forward", {"tokens": [1, 2, 3], "lengths": [2, 2]}, {}),
    "a sequence has 1 tokens; it must have from 2 to --seq-length + 1 = 25": (
        "forward", {"tokens": [1, 2, 3], "lengths": [2, 1]}, {}),
    'a request needs "tokens", int64': ("forward", {"lengths": [2]}, {}),
    'the tensor "weights" must be float32 [3], got float32 [2]': (
        "forward_backward", {"tokens": [1, 2, 3], "lengths": [3], "weights": [0.5, 0.5]}, {}),
    'forward_backward needs "weights"': ("forward_backward", {"tokens": [1, 2, 3], "lengths": [3]}, {}),
    "forward takes no weights": ("forward", {"tokens": [1, 2], "lengths": [2], "weights": [1.0, 1.0]}, {}),
    "there is no forward to go back from": ("backward", {"weights": [1.0]}, {}),
    "there are no gradients to step by": ("step", {}, {}),
    'the field "lr" must be a number, got "fast"': ("step", {}, {"lr": "fast"}),
    '"base" needs --lora-r': ("forward", {"tokens": [1, 2], "lengths": [2]}, {"base": True}),
    'save needs the field "folder"': ("save", {}, {}),
    "holds no checkpoint of a training": ("load", {}, {"folder": "/nowhere"}),
    'there is no command "dance"; known are forward, ': ("dance", {}, {}),
}


def test_a_wrong_request_changes_nothing(folder, pairs):
    tokens, lengths = server.flat([pairs[0][0], pairs[1][0]])
    with serving(folder, ranks=2) as clients:
        before = on_all(clients, lambda client, _: client.forward(tokens, lengths))[0]["log_probs"]
        for message, (command, arrays, fields) in WRONG.items():
            whole = {name: np.array(values, np.float32 if "weights" in name else np.int64)
                     for name, values in arrays.items()}
            if command == "step" and fields:  # which has gradients, but no number
                on_all(clients, lambda client, _: client.forward_backward(tokens, lengths, np.ones(len(tokens))))

            def refused(client, rank):
                with pytest.raises(server.Refused) as error:
                    client.request(command, whole, **fields)
                return str(error.value)

            assert all(message in said for said in on_all(clients, refused))
        on_all(clients, lambda client, _: client.zero_grad())

        def ask(client, rank):
            with pytest.raises(server.Refused) as error:
                client.zero_grad() if rank else client.forward(tokens, lengths, keep=True)
            return str(error.value)

        assert on_all(clients, ask) == [
            'the clients ask for different things: that of rank 0 for "forward keep=true lengths tokens", that of '
            'rank 1 for "zero_grad"; each sends the same commands in the same order'] * 2
        after = on_all(clients, lambda client, _: client.forward(tokens, lengths))[0]["log_probs"]
        np.testing.assert_array_equal(before, after)


BREAKS = {
    "is gone, in the middle of a message": server.encode({"command": "step"}, {})[:40],
    "is no message of this protocol": b"GET / HTTP/1.1\r\n\r\n",
    "is gone; one that needs the server no more sends": b"",
    "a client sends a message of 1311768467463790320 bytes": server.MARK + bytes.fromhex("f0debc9a78563412"),
    "is no safetensors file": server.MARK + (12).to_bytes(8, "little") + b"x" * 12,
}


@pytest.mark.parametrize("message", BREAKS)
def test_a_broken_client_ends_all_ranks(folder, pairs, message):
    with serving(folder, ranks=2, expect=megashard.FAILURE) as clients:
        clients[1]._socket.sendall(BREAKS[message])
        clients[1].close()
        with pytest.raises(server.MegashardError, match="has ended"):
            clients[0].zero_grad()
    said = [line for line in clients[-1].splitlines() if message in line]
    assert said and "rank 1" in said[0] and f"{folder}/socket.1" in said[0]


def test_sockets_that_are_taken(folder, pairs):
    flags = megashard.with_defaults(["--hf-model", folder / "model"], TRAINING)
    with serving(folder):
        done = megashard.run(megashard.PROGRAM, "serve", folder / "socket", *flags, expect=megashard.USAGE)
        assert f"no socket can be at {folder}/socket.0: another process listens there" in done.stderr
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "socket.0"))
    left.close()
    assert (folder / "socket.0").exists()
    with serving(folder):
        assert (folder / "socket.0").stat().st_mode & 0o777 == 0o600
    with serving(folder, expect=128 + signal.SIGINT) as (client,):
        client.server.send_signal(signal.SIGINT)
    for words, message in [
            (["--hf-model", "x"], "serve: the path of the socket comes first"),
            ([folder / "pairs.vision.safetensors" / "a", *flags], "is no folder"),
            ([folder / ("a" * 120), *flags], "a socket's has 107 at most"),
            ([folder / "socket", *flags, "--objective", "dpo"], "--objective is for pretrain; with serve the client"),
            ([folder / "socket", *flags, "--device", "sim", "--distributed-backend", "nccl"],
             "serve needs a backend for the CPU")]:
        done = megashard.run(megashard.PROGRAM, "serve", *words, expect=megashard.USAGE)
        assert message in done.stderr


def test_the_example_of_the_page(folder, pairs, capsys):
    text, = blocks_run_by("tests/interop/test_serve.py", megashard.ROOT / "docs" / "serving_losses.md")
    with serving(folder, stops=False):
        exec(text.replace("megashard.server", "door.server").replace("/tmp/policy", f"{folder}/socket"), {})
    assert "'step': 1, 'grad_norm': " in capsys.readouterr().out
