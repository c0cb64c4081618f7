"""The server of an engine: the ranks of a framework's own world each start a rank of `megashard serve`."""
import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import tempfile
import weakref

from .program import error_of, program, variables, words_of
from .server import Client

FLAGS = "MEGASHARD_SERVE_FLAGS"  # more options of the server, as on a command line
FOLDER = "MEGASHARD_FOLDER"  # one that all hosts share, for weights on their way to an inference engine


def free_port():
    with socket.socket() as trial:
        trial.bind(("", 0))
        return trial.getsockname()[1]


def stop(process, folder):
    """For a process whose client is gone: it ends by itself, or is ended."""
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class Server:
    """This process's rank of the server, and the client of the ranks that share its data if it is their first one."""

    def __init__(self, arguments, *, fsdp2=None, sharing=1):
        """arguments: those of `megashard serve`, in snake case. fsdp2: the keys of the FSDP2 file. sharing: so many
        neighbours have the same data. torch.distributed's world gives the ranks; all of them call this."""
        import torch.distributed as dist

        rank, world = dist.get_rank(), dist.get_world_size()
        shared = os.environ.get(FOLDER)
        mine = [free_port(), tempfile.mkdtemp(prefix="megashard_", dir=shared)] if rank == 0 else [None, None]
        dist.broadcast_object_list(mine, src=0)
        port, self.folder = mine
        own = tempfile.mkdtemp(prefix="megashard_")
        path = os.path.join(own, "socket")
        self._log = pathlib.Path(own, "log")
        if fsdp2:
            file = os.path.join(own, "fsdp2.yaml")
            pathlib.Path(file).write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in fsdp2.items()))
            arguments = {"fsdp2_config_path": file, **arguments}
        variables_of_rank = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port),
                             "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
                             "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
        words = [*words_of("serve", arguments), *shlex.split(os.environ.get(FLAGS, ""))]
        with open(self._log, "wb") as output:
            self.process = subprocess.Popen([program(), "serve", path, *words], stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=subprocess.STDOUT, env=variables(variables_of_rank))
        self.client = None
        self._end = weakref.finalize(self, stop, self.process, own)
        if rank == 0:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        if rank % sharing == 0:
            self.client = self._connect(path, rank // sharing)
            weakref.finalize(self, self.client.close)  # the last one is called first

    def _connect(self, path, number):
        """Waits for the socket as long as the server starts."""
        while not os.path.exists(f"{path}.{number}"):
            try:
                self.process.wait(0.05)
                raise self._why_ended()
            except subprocess.TimeoutExpired:
                pass
        return Client(path, number, why_ended=self._why_ended)

    @property
    def log(self):
        """What this rank has printed."""
        return self._log.read_text(errors="replace")

    def _why_ended(self):
        return error_of(self.log, self.process.wait(20))

    def stop(self):
        """Ends the server; all ranks call it."""
        if self.client is not None:
            self.client.stop()
        self._end()

    def weights(self):
        """Yields (name, tensor) of the whole weights, adapters merged, by way of files in a folder that all ranks
        share. All ranks call this at once."""
        import torch.distributed as dist

        if self.client is not None:
            self.client.save_weights(self.folder)
        dist.barrier()
        return tensors_in(self.folder)


def tensors_in(folder):
    from safetensors import safe_open

    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():
                yield name, weights.get_tensor(name)


WEIGHTS = {"log_probs": "weights", "values": "value_weights", "entropies": "entropy_weights"}  # of Client.backward


def leaves_of(found, device, requires_grad):
    """The arrays of a forward by their names, as leaves of autograd."""
    import torch

    return {name: torch.from_numpy(found[name].copy()).to(device).requires_grad_(requires_grad)
            for name in WEIGHTS if name in found}


def weights_by(leaves):
    """What Client.backward takes, behind loss.backward(): zeros for numbers that the loss has not used, so that all
    ranks send the same names."""
    import torch

    return {WEIGHTS[name]: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
