"""Programs built outside the tree against an installed megashard: that of docs/user_models.md, and models for
--model-plugin."""
import json
import os
import pathlib
import re
import shutil

import pytest

import megashard
from megashard import BUILD, ROOT, TRACKER, environment, losses, network


def run(*command, cwd, expect=0, **variables):
    done = megashard.run(*command, cwd=cwd, expect=expect, timeout=300, env=environment(**variables))
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The prefix of an installation that is staged in a folder of its own, and the folder of its megashard.pc."""
    folder = tmp_path_factory.mktemp("installed")
    run("meson", "install", "-C", BUILD, "--no-rebuild", "--destdir", folder, cwd=folder)
    packages = next(folder.rglob("megashard.pc")).parent
    prefix = re.search("^prefix=(.*)$", (packages / "megashard.pc").read_text(), re.MULTILINE)[1]
    return pathlib.Path(f"{folder}{prefix}"), packages


def flags_of(packages, folder):
    """docs/user_models.md's, of an installation that was staged or moved."""
    return run("pkg-config", "--define-prefix", "--cflags", "--libs", "megashard", cwd=folder,
               PKG_CONFIG_PATH=str(packages)).split()


def test_what_is_installed_is_what_the_setup_builds():
    """`meson install --no-rebuild` after launch/setup, which builds no tests, finds all files."""
    targets = re.search(r"\|\| targets=\((.*)\)", (ROOT / "launch" / "setup").read_text())[1].split()
    built = set()
    for tool in ("query", "inputs"):  # targets, and their inputs
        built |= set(run("ninja", "-C", BUILD, "-t", tool, *targets, cwd=ROOT).split())
    files = [pathlib.Path(path) for path in json.loads(run("meson", "introspect", "--installed", BUILD, cwd=ROOT))]
    made = {str(path.relative_to(BUILD)) for path in files if path.is_relative_to(BUILD)}
    configured = {name for name in made if name.endswith((".yaml", ".cmake", ".pc"))}
    assert len(made - configured) > 12 and not made - configured - built


def test_it_runs_where_it_was_staged_or_moved(tmp_path, installed):
    """bin finds lib beside itself, wherever both are."""
    shutil.copytree(installed[0], tmp_path / "moved", symlinks=True)
    for prefix in (installed[0], tmp_path / "moved"):
        found = run("ldd", *prefix.rglob("libmegashard_programs.so"), cwd=tmp_path, LD_LIBRARY_PATH="")
        assert f"libmegashard.so => {prefix}/" in found and "not found" not in found
        assert "usage: megashard SUBCOMMAND" in run(prefix / "bin" / "megashard", "--help", cwd=tmp_path,
                                                    LD_LIBRARY_PATH="")


def programs_of(page):
    return "".join(re.findall(r"^```cpp\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


def printed_by_two_ranks(program, folder, installed):
    """The text of a C++ program, built against the installation; what each rank prints, whole and at its end."""
    prefix, packages = installed
    (folder / "train.cpp").write_text(program)
    run("g++", "train.cpp", "-o", "train", *flags_of(packages, folder), cwd=folder)
    lines = run(prefix / "bin" / "megashard", "launch", "-n", 2, "--", "./train", cwd=folder).splitlines()
    return lines[:len(lines) // 2], lines[len(lines) // 2:]


NET = """
#include <ATen/ops/randn.h>
#include <cstdio>
struct BlockImpl : torch::nn::Module {
  BlockImpl() : w(register_parameter("w", at::randn({8, 8}))) {}
  at::Tensor forward(at::Tensor x) { return x.matmul(w).tanh(); }
  at::Tensor w;
};
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 2; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<megashard::Hooked<BlockImpl>>()));
  }
  at::Tensor forward(at::Tensor x, at::Tensor y) {
    for (auto& layer : layers) x = layer->forward(x);
    const at::Tensor loss = (x - y).square().mean();
    std::printf("%.6f\\n", loss.item<float>());
    return loss;
  }
  std::vector<std::shared_ptr<megashard::Hooked<BlockImpl>>> layers;
};
using Net = megashard::Hooked<NetImpl>;
std::vector<std::pair<at::Tensor, at::Tensor>> batches(5, {at::randn({4, 8}), at::randn({4, 8})});
"""


def test_the_fifteen_lines_of_the_readme_train(tmp_path, installed):
    includes, main = re.fullmatch(r"((?:#include [^\n]*\n)+)(.*)", programs_of("README.md"), re.DOTALL).groups()
    printed = printed_by_two_ranks(includes + NET + main, tmp_path, installed)
    seen = [float(line) for line in printed[0]]
    assert len(seen) == 5 and seen[-1] < seen[0], printed[0]


def test_the_program_of_user_models_builds_and_trains(tmp_path, installed):
    assert run(installed[0] / "bin" / "megashard", "--version", cwd=tmp_path).startswith("megashard ")
    printed = printed_by_two_ranks(programs_of("docs/user_models.md"), tmp_path, installed)
    seen = [float(line.split()[-1]) for line in printed[0]]
    assert len(seen) == 10 and seen[-1] < seen[0] - 0.05, printed[0]
    assert printed[1] == printed[0]  # both were given the same text


@pytest.fixture(scope="module")
def plugins(tmp_path_factory, installed):
    """The example model, built with pkg-config; with MEGASHARD_EVERY_BUILD=1 by its Meson and CMake files too
    (slow)."""
    folder = tmp_path_factory.mktemp("plugins")
    shutil.copytree(ROOT / "launch" / "examples" / "user_model", folder, dirs_exist_ok=True)
    found = {"PKG_CONFIG_PATH": str(installed[1]), "CXXFLAGS": "-O0"}
    run("g++", "-shared", "-fPIC", "-O0", "my_model.cpp", "-o", "libmymodel.so", *flags_of(installed[1], folder),
        cwd=folder)
    built = {"pkg-config": folder / "libmymodel.so"}
    if not os.environ.get("MEGASHARD_EVERY_BUILD"):
        return built
    run("meson", "setup", "meson", cwd=folder, **found, PKG_CONFIG="pkg-config --define-prefix")
    run("ninja", "-C", "meson", cwd=folder)
    built["meson"] = folder / "meson" / "libmymodel.so"
    if shutil.which("cmake"):
        run("cmake", "-B", "cmake", "-DPKG_CONFIG_ARGN=--define-prefix", cwd=folder, **found)
        run("cmake", "--build", "cmake", cwd=folder)
        built["cmake"] = folder / "cmake" / "libmymodel.so"
    return built


TRAIN = (f"{network(layers=3, hidden=32)} --mock-data --micro-batch-size 2 --global-batch-size 8 --train-iters 12 "
         f"--lr 1e-2 {megashard.RUN}").split()


def train(program, ranks, plugin, folder, *flags, expect=0):
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    out = run(program, "launch", "-n", ranks, "--", "pretrain", "--model-plugin", plugin, *TRAIN, "--metrics-file",
              metrics, *([] if "--model" in flags else ["--model", "my_model"]), *flags, cwd=folder, expect=expect)
    return losses(map(json.loads, metrics.read_text().splitlines())) if not expect else [], out


def test_a_model_of_a_plugin_trains(tmp_path, installed, plugins):
    program = installed[0] / "bin" / "megashard"
    straight, out = train(program, 2, plugins["pkg-config"], tmp_path, "--save", "a", "--save-interval", "6")
    assert "recompute_modules: blocks.2 -> 1 module" in out  # its own choice
    assert straight[-1] < straight[0] - 0.05
    for built in list(plugins.values())[1:]:
        assert train(program, 2, built, tmp_path)[0] == straight
    from_meta, _ = train(program, 2, plugins["pkg-config"], tmp_path,
                         "--init-model-with-meta-device")
    assert from_meta == straight
    (tmp_path / "a" / TRACKER).write_text("6")
    resumed, _ = train(program, 1, plugins["pkg-config"], tmp_path, "--load", "a")  # on other ranks
    assert resumed == pytest.approx(straight[6:], abs=1e-6)  # one rank adds gradients in another order


def test_a_plugins_names_are_what_torch_dist_stores(tmp_path, installed, plugins):
    program, plugin = installed[0] / "bin" / "megashard", plugins["pkg-config"]
    dist = ["--ckpt-format", "torch_dist"]
    straight, _ = train(program, 2, plugin, tmp_path, "--save", "a", "--save-interval", "6", *dist)
    assert "  network        my_model: 3 layers, hidden size 32, " in run(program, "inspect", "a", cwd=tmp_path)
    stored = json.loads(run(program, "inspect", "a", "--json", cwd=tmp_path))["tensors"]
    names = {tensor["name"] for tensor in stored}
    assert "model.output_layer.weight" in names and "model.head.weight" not in names
    (tmp_path / "a" / TRACKER).write_text("6")
    resumed, _ = train(program, 2, plugin, tmp_path, "--load", "a", *dist)
    assert resumed == straight[6:]


def test_a_plugin_depends_on_no_flag(tmp_path, installed, plugins):
    """Its headers have no struct that a new flag changes, and it reads flags by name."""
    listed = run("g++", "-M", "my_model.cpp", *flags_of(installed[1], plugins["pkg-config"].parent),
                 cwd=plugins["pkg-config"].parent)
    assert "/megashard/framework/arguments/argument_view.h" in listed
    assert re.findall(r"framework/arguments/\w*arguments\.h", listed) == []


def test_what_is_no_plugin_says_so(tmp_path, installed, plugins):
    program = installed[0] / "bin" / "megashard"

    def refused(plugin, *flags):
        return train(program, 2, plugin, tmp_path, *flags, expect=2)[1].splitlines()[-1]

    assert "is no file; give the path of a shared library" in refused("there.so")
    (tmp_path / "text.so").write_text("no library")
    assert "cannot be loaded: " in refused(tmp_path / "text.so")
    (tmp_path / "plain.c").write_text("int answer(void) { return 42; }")
    run("gcc", "-shared", "-fPIC", "plain.c", "-o", "plain.so", cwd=tmp_path)
    assert "is no plugin: it does not export megashard_model_plugin()" in refused(tmp_path / "plain.so")

    # The memory layout of megashard::ModelPlugin, with other versions.
    def other(name, version, libtorch, size):
        (tmp_path / f"{name}.c").write_text(
            "#include <stddef.h>\nstruct { unsigned version; const char* libtorch; size_t sizes[3]; void* add; } "
            "plugin = "
            f"{{{version}, {libtorch}, {{{size}}}, 0}};\nvoid* megashard_model_plugin(void) {{ return &plugin; }}")
        run("gcc", "-shared", "-fPIC", f"{name}.c", "-o", f"{name}.so", cwd=tmp_path)
        return refused(tmp_path / f"{name}.so")

    assert "its interface is 7, this program's 2; build it again" in other("interface", 7, '"2.11.0"', 1)
    assert "was built against LibTorch 1.0, this program runs on 2." in other("torch", 2, '"1.0"', 1)
    (tmp_path / "throws.cpp").write_text(
        "#include <stdexcept>\nextern \"C\" void* megashard_model_plugin() { throw std::runtime_error(\"out of "
        "luck\"); }")
    run("g++", "-shared", "-fPIC", "throws.cpp", "-o", "throws.so", cwd=tmp_path)
    assert "failed to register its models: out of luck" in refused(tmp_path / "throws.so")
    unknown = train(program, 2, plugins["pkg-config"], tmp_path, "--model", "mine", expect=2)[1]
    assert "no model is registered for architecture mine; known are: " in unknown and "my_model" in unknown


def test_cmake_finds_it(tmp_path, installed):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(mine CXX)\nfind_package(megashard 0.1 REQUIRED)\n"
        "add_executable(mine mine.cpp)\ntarget_link_libraries(mine megashard::megashard)\n")
    (tmp_path / "mine.cpp").write_text(
        "#include <megashard/megashard.h>\n#include <cstdio>\n"
        "int main() { std::printf(\"%d ranks\\n\", megashard::init_process_group()->size()); }\n")
    run("cmake", "-S", ".", "-B", "out", f"-DCMAKE_PREFIX_PATH={installed[0]}", cwd=tmp_path)
    run("cmake", "--build", "out", cwd=tmp_path)
    assert run(tmp_path / "out" / "mine", cwd=tmp_path) == "1 ranks\n"


def test_manual_pages_are_pages(tmp_path, installed):
    pages = sorted((installed[0] / "share" / "man" / "man1").glob("*.1"))
    assert [page.name for page in pages] == [
        "megashard-convert.1", "megashard-generate.1", "megashard-infer.1", "megashard-inspect.1",
        "megashard-launch.1", "megashard-models.1", "megashard-plan.1", "megashard-pretrain.1",
        "megashard-report.1", "megashard-rl.1", "megashard-serve.1", "megashard.1"]
    for page in pages:
        lines = page.read_text().splitlines()
        assert lines[0].startswith(f'.TH {page.stem} 1 ') and lines[1] == ".SH NAME"
        # Requests are the page's own: no line of the help begins as one.
        assert {line.split()[0] for line in lines if line.startswith((".", "'"))} <= {".TH", ".SH", ".nf", ".fi"}
    assert "\\-\\-lr\\-decay\\-style" in (pages[0].parent / "megashard-pretrain.1").read_text()


def test_other_shells_have_the_same_flags(installed):
    share = installed[0] / "share"
    flags = set(re.findall(r"--[\w-]+", re.search(r'pretrain\) flags="(.*)"', (
        share / "bash-completion" / "completions" / "megashard").read_text())[1]))
    assert len(flags) > 150
    zsh = (share / "zsh" / "site-functions" / "_megashard").read_text()
    assert set(re.findall(r"--[\w-]+", re.search(r"^ +pretrain\) compadd -- (.*) ;;$", zsh, re.M)[1])) == flags
    fish = (share / "fish" / "vendor_completions.d" / "megashard.fish").read_text()
    assert {"--" + name for name in re.findall(r"^complete .*_from pretrain' -l (\S+)", fish, re.M)} == flags


def test_the_version_says_what_it_was_built_against():
    import torch

    version = megashard.run(BUILD / "launch" / "megashard", "--version").stdout
    libtorch = re.escape(torch.__version__)
    assert re.match(rf"megashard \d+\.\d+\.\d+\nLibTorch {libtorch} with(out)? CUDA, gcc \d", version)
