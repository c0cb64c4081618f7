"""Saves of real processes that are killed at random moments: what had been saved is still there, whole.

save_loop.cpp saves without end, in either format, with training waiting or going on; each start reads every byte of
every step that can be seen, and goes on from there. By hand: tests/long/kill_saves SECONDS [SEED]. """

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megashard import BUILD, environment

SAVE_LOOP = BUILD / "tests/faults/save_loop"
MANNERS = [(form, how) for form in ("torch_dcp", "torch_dist") for how in ("sync", "async")]
DEADLINE = 60  # seconds; save_loop's ranks give up after 30


class Directory:
    """A folder of checkpoints through many rounds of kills."""

    def __init__(self, path):
        self.path = path
        self.save = path / "save"
        self.rounds = 0
        self.saved = (0, 0)  # iteration, generation

    def start(self, world, manner):
        meeting = self.path / f"meeting{self.rounds}"
        self.rounds += 1
        with open(self.path / "out", "w") as out:
            return [
                subprocess.Popen(
                    [SAVE_LOOP, self.save, str(rank), str(world), meeting, *manner],
                    stdout=out,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment(),
                )
                for rank in range(world)
            ]

    def lines(self):
        return [line.split() for line in (self.path / "out").read_text().splitlines()]

    def wait_for_a_save(self, ranks):
        end = time.monotonic() + DEADLINE
        while len(self.lines()) < 2:
            assert time.monotonic() < end, f"no save within {DEADLINE} s"
            for rank in ranks:
                assert rank.poll() is None, rank.stderr.read()
            time.sleep(0.01)

    def check(self):
        """Compares the step that this round found with those that the previous round had saved."""
        lines = self.lines()
        found, last = (tuple(map(int, lines[i][1:])) for i in (0, -1))
        assert found >= self.saved, f"{self.saved} was saved, {found} was found"
        self.saved = last
        steps = sorted(step.name for step in self.save.glob("iter_*"))
        assert len(steps) <= 3, f"save_loop keeps two steps, and has one more for a moment: {steps}"
        return len(lines) - 1


def kill_once(directory, dice, manner, world=2):
    """One round; returns how many saves went well."""
    ranks = directory.start(world, manner)
    try:
        directory.wait_for_a_save(ranks)
        time.sleep(dice.uniform(0, 0.3))
        victims = ranks if dice.random() < 0.5 else [dice.choice(ranks)]
        for rank in victims:
            rank.kill()
        for rank in ranks:  # those that are left give up by themselves
            errors = rank.communicate(timeout=DEADLINE)[1]
            if rank not in victims:
                assert rank.returncode == 1 and errors.strip(), (rank.returncode, errors)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return directory.check()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_saved_is_lost_to_kills(tmp_path, seed):
    directory, dice = Directory(tmp_path), random.Random(seed)
    for manner in dice.sample(MANNERS, len(MANNERS)):
        kill_once(directory, dice, manner)


def main():
    import tempfile

    seconds = float(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 30)
    dice = random.Random(seed)
    end = time.monotonic() + seconds
    saves = {manner: [] for manner in MANNERS}  # of each round
    with tempfile.TemporaryDirectory() as folder:
        directory = Directory(Path(folder))
        try:
            while time.monotonic() < end:
                manner = dice.choice(MANNERS)
                saves[manner].append(kill_once(directory, dice, manner, world=dice.choice([1, 2, 3])))
        except AssertionError as error:
            passed = sum(map(len, saves.values()))
            print(f"round {passed + 1} of seed {seed}, {' '.join(manner)}: {error}")
            print(f"repeat: tests/long/kill_saves {seconds:g} {seed}")
            print(f"{passed} passed, 1 failed")
            sys.exit(1)
    for manner, counts in saves.items():
        print(f"{' '.join(manner)}: {len(counts)} rounds of kills, {sum(counts)} saves between them")
    passed = sum(map(len, saves.values()))
    print(f"{passed} rounds of kills, {sum(map(sum, saves.values()))} saves between them, seed {seed}")
    print(f"{passed} passed, 0 failed")


if __name__ == "__main__":
    main()
