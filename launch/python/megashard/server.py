"""The client of `megashard serve` (docs/serving_losses.md). Needs numpy; torch tensors are taken, too."""
import json
import os
import socket
import struct
import time

import numpy as np

from .program import MegashardError

MARK = b"megashd1"  # the last byte is the protocol's version
TYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}


class Refused(MegashardError):
    """The server has not carried out the request, and goes on."""


def array(values, kind):
    """A flat array of that kind from numbers, an array or a torch tensor."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.ascontiguousarray(np.asarray(values, dtype=kind).reshape(-1))


def encode(fields, arrays):
    """A message: the bytes of a safetensors file, behind the mark and their number."""
    header, data, end = {"__metadata__": fields}, [], 0
    for name, values in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
        header[name] = {"dtype": NAMES[values.dtype], "shape": list(values.shape),
                        "data_offsets": [end, end + values.nbytes]}
        data.append(values.tobytes())
        end += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join([struct.pack("<Q", len(text)), text, *data])
    return MARK + struct.pack("<Q", len(body)) + body


def decode(body):
    """Fields and arrays of such bytes."""
    size, = struct.unpack_from("<Q", body)
    header = json.loads(body[8:8 + size])
    fields, arrays = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        arrays[name] = np.frombuffer(body[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return fields, arrays


def flat(rows):
    """Tokens and lengths of sequences."""
    return np.concatenate([array(row, np.int64) for row in rows]), np.array([len(row) for row in rows])


class Client:
    """A connection to SOCKET.RANK, of the ranks of the server that have the data with that number.

    Tokens are those of all sequences one after the other, and `lengths` says how many each has. Entry t of log_probs,
    values, entropies and weights is about token t + 1; that of a sequence's last token counts for nothing. Every client
    sends the same commands in the same order, with its own data."""

    def __init__(self, path, rank=0, timeout=600, why_ended=None):
        """timeout: seconds until the server has to be there; its replies may take longer. why_ended: called for the
        exception that is raised if the server has ended."""
        self.path = f"{os.fspath(path)}.{rank}"
        self._why_ended = why_ended or (lambda: MegashardError(
            f"the server at {self.path} has ended; its output says why"))
        deadline = time.monotonic() + timeout
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.connect(self.path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                self._socket.close()
                if time.monotonic() > deadline:
                    raise MegashardError(f"no server listens at {self.path} within {timeout} s") from None
                time.sleep(0.05)
        self._socket.settimeout(max(1.0, deadline - time.monotonic()))
        try:
            fields, _ = self.request("hello")
        except TimeoutError:
            raise MegashardError(f"the server at {self.path} does not answer; it takes one client") from None
        self._socket.settimeout(None)
        self.data_parallel_rank, self.data_parallel_size = rank, int(fields["data_parallel_size"])
        self.vocab_size, self.seq_length = int(fields["vocab_size"]), int(fields["seq_length"])
        self.step_number, self.lr = int(fields["step"]), float(fields["lr"])

    def request(self, command, arrays=None, **fields):
        """Sends a command with its fields and arrays, and returns those of the reply."""
        words = {name: "true" if value is True else str(value) for name, value in fields.items()
                 if value is not None and value is not False}
        try:
            self._socket.sendall(encode({"command": command, **words}, arrays or {}))
            head = self._read(16)
            if head[:8] != MARK:
                raise MegashardError(f"what listens at {self.path} is no server of this protocol")
            fields, arrays = decode(self._read(struct.unpack("<Q", head[8:])[0]))
        except (BrokenPipeError, ConnectionResetError, EOFError):
            raise self._why_ended() from None
        if "error" in fields:
            raise Refused(fields["error"])
        return fields, arrays

    def _read(self, count):
        data = bytearray()
        while len(data) < count:
            part = self._socket.recv(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def forward(self, tokens, lengths, *, temperatures=None, entropies=False, keep=False, base=False):
        """{name: array} of log_probs, of a model with a score head values; entropies if asked for.

        keep: for a backward() behind it, in training mode. base: without the model's adapters."""
        return self.request("forward", self._rows(tokens, lengths, temperatures), entropies=entropies, keep=keep,
                            base=base)[1]

    def backward(self, weights=None, *, value_weights=None, entropy_weights=None, aux=None):
        """Adds the gradients of a loss to those of the step, by the loss's gradients by the numbers of the forward.

        aux: factor of the model's own terms of the loss, such as a router's balance: 1 / micro batches of a step."""
        self.request("backward", weights_of(weights, value_weights, entropy_weights), aux=aux)

    def forward_backward(self, tokens, lengths, weights=None, *, value_weights=None, entropy_weights=None,
                         temperatures=None, aux=None):
        """forward() and backward() in one, for weights that are known before."""
        arrays = self._rows(tokens, lengths, temperatures) | weights_of(weights, value_weights, entropy_weights)
        return self.request("forward_backward", arrays, entropies=entropy_weights is not None, aux=aux)[1]

    def step(self, lr=None):
        """Clips the gradients, steps the optimizer and clears them. Returns step, grad_norm, lr, next_lr and skipped:
        the norm was not finite, and no weight has changed. lr: instead of the schedule's."""
        fields, _ = self.request("step", lr=lr)
        self.step_number, self.lr = int(fields["step"]), float(fields["next_lr"])
        return {"step": self.step_number, "grad_norm": float(fields["grad_norm"]), "lr": float(fields["lr"]),
                "next_lr": self.lr, "skipped": fields["skipped"] == "true"}

    def zero_grad(self):
        self.request("zero_grad")

    def save(self, folder):
        """A checkpoint of the training, as --save's."""
        self.request("save", folder=os.path.abspath(folder))

    def load(self, folder):
        """The last checkpoint in the folder. Returns its step."""
        self.step_number = int(self.request("load", folder=os.path.abspath(folder))[0]["step"])
        return self.step_number

    def save_weights(self, folder, adapters=False):
        """The model's weights, adapters merged, as files of Hugging Face; or the adapters alone, as PEFT's."""
        self.request("save_weights", folder=os.path.abspath(folder), adapters=adapters)

    def stop(self):
        """Ends the server, once all clients have said so."""
        self.request("stop")
        self.close()

    def close(self):
        """Without stop() the server takes this for the death of its client, and ends with an error."""
        self._socket.close()

    def _rows(self, tokens, lengths, temperatures):
        rows = {"tokens": array(tokens, np.int64), "lengths": array(lengths, np.int64)}
        if temperatures is not None:
            rows["temperatures"] = array(temperatures, np.float32)
        return rows


def weights_of(weights, value_weights, entropy_weights):
    given = {"weights": weights, "value_weights": value_weights, "entropy_weights": entropy_weights}
    return {name: array(values, np.float32) for name, values in given.items() if values is not None}
