"""`megashard completion SHELL` in that shell: the completions of a partly typed line."""
import os
import pty
import shutil
import signal

import pytest

from megashard import PROGRAM, environment, run

# What a line's last word may become. There is a file long.yaml, and a folder longer.
LINES = {
    "megashard pl": {"plan"},
    "megashard inspect --veri": {"--verify"},
    "megashard plan --device-m": {"--device-memory"},
    "megashard pretrain --tens": {"--tensor-model-parallel-size", "--tensorboard-dir", "--tensorboard-log-interval",
                                  "--tensorboard-queue-size"},
    "megashard pretrain --lr-decay-style co": {"constant", "cosine"},
    "megashard pretrain lon": {"long.yaml", "longer"},
    "megashard pretrain --fsdp2-config-path long.": {"long.yaml"},
    "megashard pretrain --fsdp2-plan ": {"auto", "off"},
    "megashard pretrain --context-parallel-algo ": {"ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo",
                                                    "kvallgather_cp_algo"},
    "megashard launch --mas": {"--master-port"},
    "megashard launch -n 2 -- pre": {"pretrain"},
    "megashard launch -n 2 -- pretrain --hidden-s": {"--hidden-size"},
    "megashard launch -n 2 -- pretrain --lr-decay-style co": {"constant", "cosine"},
    "megashard launch -n 2 -- infer --master": {"--master"},  # no completion: it is no flag of infer
}
ALL = "\x14"  # Ctrl-T puts all candidates in the place of the word
LINE_BEGINS = "\x01"  # Ctrl-A
BASH = rf"""source completions
bind '"{ALL}": insert-completions'
"""
ZSH = rf"""fpath=($PWD $fpath)
autoload -Uz compinit && compinit -u -d dump
insert_all() {{ compstate[insert]=all }}
complete_all() {{ comppostfuncs=(insert_all); _main_complete }}
zle -C complete_all complete-word complete_all
bindkey -e
bindkey '{ALL}' complete_all
"""
TYPED = {  # by shell: its command, the file that it reads as it starts, and the file of completions
    "bash": (["bash", "--noprofile", "--rcfile", "begin", "-i"], "begin", BASH, "completions"),
    "zsh": (["zsh", "--no-globalrcs", "-i"], ".zshrc", ZSH, "_megashard"),
}


def type_into(command, keys, folder):
    """Runs the shell on a new terminal until it exits."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe("timeout", ["timeout", "--foreground", "60", *command],
                   environment(HOME=str(folder), ZDOTDIR=str(folder), HISTFILE="", TERM="dumb"))
    try:
        os.write(terminal, keys.encode())
        while os.read(terminal, 65536):
            pass
    except OSError:  # Linux raises this when the other end is closed
        pass
    finally:
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGHUP), code


def completed(shell, lines, folder):
    """{line: completion of its last word}."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = run(PROGRAM, "completion", shell).stdout
    (folder / "long.yaml").touch()
    (folder / "longer").mkdir()
    if shell == "fish":
        (folder / "completions").write_text(script)
        asked = "".join(f"echo (complete -C '{line}' | string replace -r '\\t.*' '')\n" for line in lines)
        said = run("fish", "--no-config", "-c", "source completions\n" + asked, cwd=folder,
                   env=environment(HOME=str(folder))).stdout.splitlines()
    else:
        command, begin, commands, completions = TYPED[shell]
        (folder / begin).write_text(commands)
        (folder / completions).write_text(script)
        keys = "".join(f"{line}{ALL}{LINE_BEGINS}>>said echo \r" for line in lines)
        type_into(command, keys + "exit\r", folder)
        said = (folder / "said").read_text().splitlines()
        said = [text.removeprefix(line.rsplit(" ", 1)[0]) for line, text in zip(lines, said, strict=True)]
    return {line: {word.rstrip("/") for word in text.split() or [line.rsplit(" ", 1)[1]]}
            for line, text in zip(lines, said, strict=True)}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_offers_what_may_follow(tmp_path, shell):
    assert completed(shell, LINES, tmp_path) == LINES
