"""The random trees of tests/differential, trained by PyTorch's FSDP2: the same losses, gradients and weights."""

import json
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from forked_ranks import failure_in_ranks
from megashard import BUILD, run

CASES = 60
WORLDS = [1, 2, 3, 4]
LINEAR, MLP, SCALE, ROW = range(4)
# Of a tensor's largest value. fp32: PyTorch adds ranks in another order, and a unit that runs twice reduces once there.
# bf16: the same, at 2^-8 a step.
FP32, BF16 = 2e-5, 3e-2


class Node(nn.Module):
    """TreeNodeImpl of tests/differential/tree_model.cpp."""

    def __init__(self, node, width, values):
        super().__init__()
        self.node = node
        first = None
        for i, layer in enumerate(node["layers"]):
            shapes = {LINEAR: {"w": (width, width), **({"b": (width,)} if layer["bias"] else {})},
                      MLP: {"up": (layer["hidden"], width), "down": (width, layer["hidden"])},
                      SCALE: {"s": (width,)}, ROW: {"r": (1, width)}}[layer["kind"]]
            for name, shape in shapes.items():
                if name == "w" and layer["tied"]:
                    parameter = first
                else:
                    parameter = nn.Parameter(torch.tensor(next(values)).reshape(shape), not layer["frozen"])
                first = parameter if first is None else first
                self.register_parameter(f"l{i}_{name}", parameter)
        for i, child in enumerate(node["children"]):
            self.add_module(f"c{i}", Node(child, width, values))

    def forward(self, x):
        for i, layer in enumerate(self.node["layers"]):
            get = lambda name: getattr(self, f"l{i}_{name}")
            if layer["kind"] == LINEAR:
                x = x + nn.functional.linear(x, get("w"), get("b") if layer["bias"] else None)
            elif layer["kind"] == MLP:
                x = x + nn.functional.linear(torch.tanh(nn.functional.linear(x, get("up"))), get("down"))
            else:
                x = x * get("s") if layer["kind"] == SCALE else x + get("r")
        for child in self.children():
            for _ in range(child.node["calls"]):
                x = child(x)
        return torch.tanh(x)


def dtype_of(node):
    return torch.bfloat16 if node["half"] else torch.float32


def shard(module, tree, outer, mesh, joined=False):
    node = module.node
    own = dtype_of(node) if node["unit"] else outer
    children = list(module.children())
    for i, child in enumerate(children):
        second = i > 0 and children[i - 1].node["joined"]
        shard(child, tree, own, mesh, joined=child.node["joined"] or second)
        if second:
            fully_shard(children[i - 1 : i + 1], **options(children[i - 1].node, tree, own, mesh))
    if node["unit"] and not joined:
        fully_shard(module, **options(node, tree, outer, mesh))


def options(node, tree, outer, mesh):
    made = {"mesh": mesh}
    if node["reshard"] >= 0:
        made["reshard_after_forward"] = node["reshard"] if node["reshard"] > 1 else bool(node["reshard"])
    if tree["mixed"]:
        made["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype_of(node), reduce_dtype=torch.bfloat16 if node["reduces_half"] else torch.float32,
            output_dtype=outer)
    if node["shard_dim"]:
        ranks = mesh.size(mesh.ndim - 1)
        made["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % ranks == 0 else Shard(0)
    return made


def train(case, mesh, rank):
    """Losses of this rank, and every step's whole gradients and weights."""
    tree = case["tree"]
    model = Node(tree["root"], tree["width"], iter(case["initial"]))
    shard(model, tree, torch.float32, mesh)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in units:
        for kind in ("forward", "backward"):
            numbers = module.node[f"{kind}_prefetch"]
            getattr(module, f"set_modules_to_{kind}_prefetch")([units[n] for n in numbers]) if numbers else None
        if module.node["keeps_after_backward"]:
            module.set_reshard_after_backward(False, recurse=False)
    parameters = dict(model.named_parameters())
    assert list(parameters) == case["names"]
    inputs = iter(case["inputs"])
    steps = []
    for step in range(tree["steps"]):
        if step > 0 and tree["thaws"]:
            for parameter in parameters.values():
                parameter.requires_grad_(True)
        losses = []
        for microbatch in range(tree["microbatches"]):
            last = microbatch + 1 == tree["microbatches"]
            model.set_requires_gradient_sync(tree["accumulation"] != 1 or last)
            if tree["accumulation"] == 2:
                model.set_requires_all_reduce(last)
            x = [torch.tensor(next(inputs)).reshape(2, tree["width"]) for _ in range(tree["world"])][rank]
            loss = model(x.requires_grad_(tree["input_requires_grad"])).pow(2).sum()
            losses.append(loss.item())
            if loss.requires_grad:
                loss.backward()
        for module in units:
            module.reshard()
        gradients = {name: None if p.grad is None else p.grad.full_tensor().clone() for name, p in parameters.items()}
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=case["learning_rate"])
                    parameter.grad = None
        weights = {name: p.full_tensor().detach().clone() for name, p in parameters.items()}
        steps.append((losses, gradients, weights))
    return steps


def compare(case, steps, rank):
    limit = BF16 if case["tree"]["mixed"] else FP32
    wrong = []
    for number, (ours, (losses, gradients, weights)) in enumerate(zip(case["steps"], steps)):
        for microbatch, loss in enumerate(losses):
            expected = ours["losses"][microbatch][rank]
            if abs(loss - expected) > limit * max(abs(expected), 1e-3):
                wrong.append(f"step {number} microbatch {microbatch}: loss {expected} here, {loss} by PyTorch")
        for name, gradient, weight in zip(case["names"], ours["gradients"], ours["weights"]):
            for what, mine, other in (("gradient", gradient, gradients[name]), ("weight", weight, weights[name])):
                if (mine is None) != (other is None):
                    # PyTorch gives zeros for unused parameters
                    if other is not None and other.abs().max() == 0:
                        continue
                    wrong.append(f"step {number} {name}: {what} {mine and 'there'} here, {other} by PyTorch")
                elif mine is not None and other.numel() > 0:
                    mine = torch.tensor(mine).reshape(other.shape)
                    off = (mine - other).abs().max() / max(mine.abs().max(), 1e-6)
                    if off > limit:
                        wrong.append(f"step {number} {name}: {what} off by {off:.1e} of the largest")
    return wrong


def train_trees(world, cases, folder):
    """A rank's part of the trees of that world."""
    torch.set_num_threads(1)
    rank, meshes, failures = dist.get_rank(), {}, []
    for case in cases:
        tree = case["tree"]
        replicas = tree["replicas"]
        if replicas not in meshes:
            meshes[replicas] = (init_device_mesh("cpu", (world,)) if replicas == 1 else init_device_mesh(
                "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")))
        failures += [f"tree {tree['seed']}: {text}" for text in compare(case, train(case, meshes[replicas], rank),
                                                                        rank)]
    (pathlib.Path(folder) / f"result{world}-{rank}.json").write_text(json.dumps([len(cases), failures]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with each rank's results. One process reads torch and the trees, and forks the ranks of every
    world."""
    folder = tmp_path_factory.mktemp("trees")
    run(BUILD / "tests" / "differential" / "tree_dump", 1000, CASES, folder / "trees.json")
    run(sys.executable, __file__, folder, timeout=600)
    return folder


@pytest.mark.parametrize("world", WORLDS)
def test_pytorch_trains_the_same(trained, world):
    for rank in range(world):
        count, failures = json.loads((trained / f"result{world}-{rank}.json").read_text())
        assert count >= 5
        assert not failures, failures[:10]


def main(folder):
    trees = json.loads((pathlib.Path(folder) / "trees.json").read_text())
    for world in WORLDS:
        cases = [case for case in trees if case["tree"]["world"] == world]
        if failure := failure_in_ranks(world, folder, train_trees, world, cases, folder):
            return f"world {world}: {failure}"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
