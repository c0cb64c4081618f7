"""The program of README.md, built outside the tree by pkg-config against an installed megashard, trains on two ranks."""
import os
import pathlib
import re
import socket
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))


def test_the_readmes_program_builds_and_trains(tmp_path):
    def run(*command, **environment):
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True,
                              timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("meson", "install", "-C", str(BUILD), "--no-rebuild", "--destdir", str(tmp_path / "staged"))
    packages = next((tmp_path / "staged").rglob("megashard.pc")).parent
    prefix = tmp_path / "staged" / run("pkg-config", "--variable=prefix", str(packages / "megashard.pc")).strip()[1:]
    program = next((prefix / "bin").glob("megashard"))
    assert run(str(program), "--version").startswith("megashard ")

    readme = (ROOT / "README.md").read_text()
    (tmp_path / "train.cpp").write_text("".join(re.findall(r"^```cpp\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)))
    flags = run("pkg-config", "--define-variable=prefix=" + str(prefix), "--cflags", "--libs", "megashard",
                PKG_CONFIG_PATH=str(packages)).split()
    run("g++", "train.cpp", "-o", "train", *flags)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    ranks = [subprocess.Popen([tmp_path / "train", str(rank), "2", url], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in range(2)]
    try:
        printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    losses = [float(line.split()[-1]) for line in printed[0].splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.05, printed[0]
    assert printed[1] == printed[0]  # both were given the same text
