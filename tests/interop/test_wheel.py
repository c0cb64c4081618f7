"""The wheel that launch/package makes of the build: what is in it, and that it trains from a folder beside torch."""
import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import sys
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import megashard
from documented import blocks_run_by
from megashard import BUILD, PROGRAM, ROOT, USAGE, environment, losses, network, run

MINOR = ".".join(torch.__version__.split(".")[:2])
PIP = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--disable-pip-version-check"]
TAG = "py3-none-manylinux_2_28_x86_64"  # as torch's own wheel
BESIDE = os.path.dirname(os.path.dirname(torch.__file__))


@pytest.fixture(scope="module")
def wheel(folder):
    run(ROOT / "launch" / "package", "--build", BUILD, "--output", folder / "dist", timeout=600)
    made, = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def site(folder, wheel):
    """A site-packages with the wheel and, as links, torch and what it loads."""
    run(*PIP, "--target", folder / "site", wheel)
    for name in ("torch", "nvidia"):
        if os.path.exists(f"{BESIDE}/{name}"):
            (folder / "site" / name).symlink_to(f"{BESIDE}/{name}")
    return folder / "site"


def command(site, name, *words, cwd=None, expect=0, **variables):
    """A command of the wheel; output and errors. The loader is told nothing."""
    clean = environment(**{"PYTHONPATH": str(site), **variables})
    clean.pop("LD_LIBRARY_PATH", None)
    done = run(site / "bin" / name, *words, env=clean, cwd=cwd or site.parent, expect=expect)
    return done.stdout + done.stderr


def test_name_metadata_and_record(wheel):
    version = re.search(r"version: '(.*)'", (ROOT / "meson.build").read_text())[1]
    assert wheel.name == f"megashard-{version}+torch{MINOR}-{TAG}.whl"
    with zipfile.ZipFile(wheel) as files:
        about = f"megashard-{version}+torch{MINOR}.dist-info"
        metadata = files.read(f"{about}/METADATA").decode()
        assert f"\nRequires-Dist: torch=={MINOR}.*\nRequires-Dist: numpy\n" in metadata
        assert "Requires-Dist: tokenizers>=" in metadata and 'extra == "preprocess"' in metadata
        assert f"Tag: {TAG}\n" in files.read(f"{about}/WHEEL").decode()
        rows = list(csv.reader(io.StringIO(files.read(f"{about}/RECORD").decode())))
        assert {row[0] for row in rows} == {name for name in files.namelist() if not name.endswith("/")}
        for name, digest, size in rows:
            if name != f"{about}/RECORD":
                content = files.read(name)
                found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={found}", len(content)), name


def test_nothing_in_it_names_this_machine(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        content = {name: files.read(name) for name in names}
    binary = {name for name, read in content.items() if read.startswith(b"\x7fELF")}
    assert not [name for name, read in content.items() if name not in binary
                and (BESIDE.encode() in read or str(ROOT).encode() in read)]
    for name in binary:
        (tmp_path / "library").write_bytes(content[name])
        paths = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", run("readelf", "-d", tmp_path / "library").stdout)
        assert not [path for path in ":".join(paths).split(":") if path and not path.startswith("$ORIGIN")], name
    assert len(binary) >= 6
    assert not [name for name in names if re.search(r"lib(gomp|torch|c10)", name)]  # torch's own are used
    for part in ("bin/megashard", "lib/libmegashard.so", "lib/libmegashard_programs.so", "lib/libmegashard_sim.so",
                 "lib/plan/devices/h100.yaml", "include/megashard/megashard.h", "share/fsdp2_config.yaml",
                 "tools/preprocess/preprocess_data.py", "__main__.py", "__init__.py", "argument_types.py"):
        assert f"megashard/{part}" in names
    shares = {name.split(".data/data/share/")[1] for name in names if ".data/data/share/" in name}
    assert {"man/man1/megashard-pretrain.1", "bash-completion/completions/megashard"} <= shares


def test_libraries_are_found_beside_the_package(site):
    programs = site / "megashard" / "lib" / "libmegashard_programs.so"
    found = run("ldd", programs, env=environment(LD_LIBRARY_PATH="")).stdout
    assert "not found" not in found
    for name, place in (("libtorch_cpu.so", "torch/lib"), ("libgomp.so.1", "torch/lib"),
                        ("libyaml-cpp", "megashard.libs"), ("libdeflate", "megashard.libs")):
        assert re.search(rf"{name}\S* => {site}/\S*{place}/", found), name


NEWER = r"""
#include <malloc.h>
#include <sys/stat.h>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
struct Counted {
  static inline int alive = 0;
  Counted() { ++alive; }
  Counted(const Counted&) { ++alive; }
  ~Counted() { --alive; }
};
int main() {
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  const auto start = std::chrono::steady_clock::now();
  if (never.wait_for(lock, std::chrono::milliseconds(30)) != std::cv_status::timeout) return 1;
  const auto waited = std::chrono::steady_clock::now() - start;
  if (waited < std::chrono::milliseconds(30) || waited > std::chrono::seconds(10)) return 2;

  {
    std::exception_ptr copy, first = std::make_exception_ptr(Counted());
    for (int i = 0; i < 3; ++i) copy = first, first = nullptr, first = copy;
    if (Counted::alive != 1) return 3;
  }
  std::runtime_error error("text"), moved(std::move(error));
  if (Counted::alive != 0 || std::strcmp(moved.what(), "text")) return 4;
  struct stat64 status, link, file;
  if (stat64("link", &status) || lstat64("link", &link) || stat64("file", &file)) return 5;
  if (status.st_ino != file.st_ino || link.st_ino == file.st_ino || file.st_size != 5) return 6;
  const auto before = mallinfo2().uordblks + mallinfo2().hblkhd;
  void* block = std::malloc(5'000'000);
  return mallinfo2().uordblks + mallinfo2().hblkhd < before + 5'000'000 || !block ? 7 : 0;
}
"""


def test_what_old_libraries_lack(tmp_path):
    (tmp_path / "main.cpp").write_text(NEWER)
    (tmp_path / "file").write_text("12345")
    (tmp_path / "link").symlink_to("file")
    newer = ROOT / "launch" / "manylinux" / "newer_symbols.cpp"
    run("g++", "-std=c++20", "-c", "main.cpp", newer, cwd=tmp_path)
    run("ar", "rcs", "newer.a", "newer_symbols.o", cwd=tmp_path)
    run("g++", "main.o", "newer.a", "-Wl,--exclude-libs,newer.a", "-o", "main", cwd=tmp_path)
    assert "mallinfo2" not in run("nm", "-D", "--undefined-only", tmp_path / "main").stdout
    run(tmp_path / "main", cwd=tmp_path)


def test_the_first_run(site, folder):
    (folder / "text.txt").write_text("The statement of a name is a name.\n\n" * 400)
    out = command(site, "megashard", "quickstart", "--text", "text.txt", "--steps", "40", "--output", "first")
    seen = losses(map(json.loads, (folder / "first" / "metrics.jsonl").read_text().splitlines()))
    assert len(seen) == 40 and seen[-1] < 0.4 * seen[0]
    assert "\nThe statement of a name is a name." in out and "done in " in out
    assert "loss" in (folder / "first" / "report.html").read_text()

    trained = folder / "first" / "trained"
    tokenizer, model = (kind.from_pretrained(trained) for kind in (AutoTokenizer, AutoModelForCausalLM))
    assert tokenizer("Straße\n").input_ids == list("Straße\n".encode())
    prompt = tokenizer("The st", return_tensors="pt")
    said = tokenizer.decode(model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, 6:])
    assert command(site, "megashard-ask", trained, "The st", "--raw", "--new-tokens", 9).strip("\n") == said

    command(site, "megashard-preprocess", "--input", "text.txt", "--input-format", "text", "--output-prefix", "again",
            "--tokenizer-model", trained, "--append-eod")
    for kind in ("bin", "idx"):
        ours, theirs = (folder / f"{name}.{kind}" for name in ("first/data", "again_text_document"))
        assert ours.read_bytes() == theirs.read_bytes()


TRAIN = (f"{network(layers=3, hidden=32)} --mock-data --micro-batch-size 2 --global-batch-size 8 --train-iters 3 "
         f"--lr 1e-2 {megashard.RUN}").split()


def test_losses_are_those_of_the_build(site, folder):
    words = ["launch", "-n", "2", "--", "pretrain", *TRAIN, "--metrics-file"]
    for flags in ([], ["--device", "sim"]):
        run(PROGRAM, *words, "build.jsonl", *flags, cwd=folder)
        command(site, "megashard", *words, "wheel.jsonl", *flags)
        ours, theirs = (losses(map(json.loads, (folder / name).read_text().splitlines()))
                        for name in ("wheel.jsonl", "build.jsonl"))
        assert len(ours) == 3 and ours == theirs
        (folder / "build.jsonl").unlink(), (folder / "wheel.jsonl").unlink()


def test_python_finds_its_program(site, folder):
    """docs/python.md: by the package alone; the table of arguments comes from it."""
    script = "import megashard; print(megashard.program(), megashard.arguments()['lr']['type'])"
    said = run(sys.executable, "-c", script, cwd=folder, env=environment(PYTHONPATH=str(site))).stdout
    assert said == f"{site}/megashard/bin/megashard number\n"


def test_a_plugin_is_built_by_gxx_alone(site, folder):
    examples = command(site, "megashard-config", "--examplesdir").strip()
    flags = command(site, "megashard-config", "--cflags", "--libs").split()
    listed = run("pkg-config", "--cflags", "--libs", "megashard", env=environment(
        PKG_CONFIG_PATH=command(site, "megashard-config", "--pkgconfigdir").strip())).stdout.split()
    assert {os.path.realpath(flag.lstrip("-isystemILWl,rpath")) for flag in listed} == {
        os.path.realpath(flag.lstrip("-isystemILWl,rpath")) for flag in flags}
    shutil.copy(f"{examples}/user_model/my_model.cpp", folder)
    page, = blocks_run_by("tests/interop/test_wheel.py", ROOT / "docs" / "user_models.md")
    run("bash", "-euc", page, cwd=folder, timeout=300,
        env=environment(PATH=f"{site}/bin:{os.environ['PATH']}", PYTHONPATH=str(site)))
    out = command(site, "megashard", "launch", "-n", "2", "--", "pretrain", "--model-plugin", "./libmymodel.so",
                  "--model", "my_model", *TRAIN)
    assert re.search(r"iteration +3/ +3 ", out)


def test_torch_elsewhere_is_found(site, folder):
    """As in a virtual environment with --system-site-packages."""
    run(*PIP, "--target", folder / "alone", next((folder / "dist").iterdir()))
    assert "arguments" in command(folder / "alone", "megashard", "pretrain", "--help")


def test_another_torch_is_refused(site, folder):
    other = folder / "other" / "torch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "version.py").write_text("__version__ = '9.1.0+cpu'\n")
    said = command(site, "megashard", "--version", expect=USAGE, PYTHONPATH=f"{other.parent}:{site}")
    assert said == (f"megashard: error: this megashard was built for torch {MINOR}, but {other} is torch 9.1.0+cpu; "
                    f"run pip install 'torch=={MINOR}.*', or install megashard's wheel for torch 9.1\n")


def test_what_is_asked_wrongly(site, folder):
    assert "megashard-config takes --cflags, " in command(site, "megashard-config", "--flags", expect=USAGE)
    (folder / "short.txt").write_text("short")
    assert "too short; give a text of at least" in command(site, "megashard", "quickstart", "--text", "short.txt",
                                                           expect=USAGE)
    said = run(ROOT / "launch" / "package", "--build", folder / "nothing", expect=1).stderr
    assert "has no build; run launch/setup, then this again" in said
