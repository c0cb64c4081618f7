"""Checkpoints as dicts of torch's tensors."""
import json
import pathlib
import warnings

from .program import UsageError

TRACKER = "latest_checkpointed_iteration.txt"


def step_folder(folder, step):
    """DIR/iter_0000010 or DIR/release of the tracker or of `step`; DIR itself if it is a step or a model."""
    tracker = folder / TRACKER
    if step is None and not tracker.exists():
        return folder
    name = tracker.read_text().strip() if step is None else str(step)
    found = folder / (name if name == "release" else f"iter_{int(name):07d}")
    if not found.is_dir():
        raise UsageError(f"{folder} has no step {name}; it has " +
                         (", ".join(sorted(each.name for each in folder.glob("iter_*"))) or "none"))
    return found


def load_checkpoint(folder, step=None, *, optimizer=False):
    """{name: tensor} of a checkpoint of a training (torch_dcp), or of a folder of safetensors.

    folder: --save's, with the latest step or the one given, a step's own folder, or a model's.
    optimizer: also its state, as optimizer.state.NAME.exp_avg and so on.
    Weights have the names of the Hugging Face model. Nothing else than tensors is read."""
    path = step_folder(pathlib.Path(folder), step)
    if (path / ".metadata").exists():
        return load_dcp(path, optimizer)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{path} has neither .metadata (a torch_dcp step) nor *.safetensors; `megashard inspect "
                         f"{path}` says what it is, `megashard convert` converts other formats")
    return load_safetensors(path, files)


def load_dcp(path, with_optimizer):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if (path / "metadata.json").exists():
        raise UsageError(f"{path} is a torch_dist step of Megatron; `megashard convert torch_dist_to_dcp` converts it")
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    nested = metadata.planner_data or {}
    tensors, names = {}, {}
    for key, stored in metadata.state_dict_metadata.items():
        is_weight = not key.startswith("optimizer.")
        if isinstance(stored, TensorStorageMetadata) and (is_weight or with_optimizer):
            tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
            where = nested.get(key, (key,))
            names[key] = where[1] if is_weight and len(where) == 2 else key
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {names[key]: tensor for key, tensor in tensors.items()}


def load_safetensors(path, files):
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UsageError(f"{path} holds safetensors files; `pip install safetensors` lets Python read them") from None
    index = path / "model.safetensors.index.json"
    if index.exists():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
