"""A program outside the tree, built by pkg-config against an installed megashard."""
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))

PROGRAM = """
#include <ATen/ops/ones.h>
#include <framework/multi_modal_module.h>
#include <parallel/sharded_tensor.h>

#include <cstdio>

struct Doubler : megashard::MultiModalModule {
  at::Tensor forward(megashard::ModelInput input) override { return input.tokens * 2; }
  int64_t vocab_size() const override { return 3; }
};

int main() {
  auto model = std::make_shared<Doubler>();
  megashard::ModelInput input;
  input.tokens = at::ones({2});
  std::printf("%s %g\\n", model->class_name().c_str(), (*model)(input).sum().item<double>());
}
"""


def test_a_program_outside_the_tree_builds_and_runs(tmp_path):
    def run(*command, **environment):
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True,
                              timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("meson", "install", "-C", str(BUILD), "--no-rebuild", "--destdir", str(tmp_path / "staged"))
    packages = next((tmp_path / "staged").rglob("megashard.pc")).parent
    prefix = tmp_path / "staged" / run("pkg-config", "--variable=prefix", str(packages / "megashard.pc")).strip()[1:]

    (tmp_path / "program.cpp").write_text(PROGRAM)
    flags = run("pkg-config", "--define-variable=prefix=" + str(prefix), "--cflags", "--libs", "megashard",
                PKG_CONFIG_PATH=str(packages)).split()
    run("g++", "program.cpp", "-o", "program", *flags)
    assert run("./program") == "Doubler 4\n"
    program = next((prefix / "bin").glob("megashard"))
    assert run(str(program), "--version").startswith("megashard ")
