"""Folders of latents for tests, in the form of MindSpeed-MM's features, and the order in which they are trained."""
import json

import numpy
import torch


def write_latents(folder, samples, says_shape=True):
    """samples: dicts of features, as launch/preprocess/preprocess_latents.py writes them."""
    (folder / "features").mkdir(parents=True)
    lines = []
    for number, sample in enumerate(samples):
        torch.save(sample, folder / f"features/{number}_mp4.pt")
        shape = {"shape": list(sample["video"].shape)} if says_shape else {}
        lines.append(json.dumps({"file": f"features/{number}_mp4.pt"} | shape))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def sample_order(samples, count, run, seed=1234):
    """The samples of a training: numpy's shuffle in each epoch, then runs of one shape (LatentDataset)."""
    random, waiting, order = numpy.random.RandomState(seed), {}, []
    while len(order) < count:
        epoch = list(range(len(samples)))
        random.shuffle(epoch)
        for number in epoch:
            waiting.setdefault(tuple(samples[number]["video"].shape), []).append(number)
        runs = []
        for _, numbers in sorted(waiting.items()):
            while len(numbers) >= run:
                runs.append([numbers.pop(0) for _ in range(run)])
        random.shuffle(runs)
        order += [number for each in runs for number in each]
    return [samples[number] for number in order[:count]]
