"""Writes upstream_files.json: the launch scripts and configurations of four projects, as flags and keys with values.

    python tests/golden/make_upstream_list.py FOLDER > tests/golden/upstream_files.json

FOLDER has a clone of each project (NVIDIA/Megatron-LM is FOLDER/Megatron-LM, bare or not), of which HEAD is read. Only
facts are taken: names of flags and keys, numbers, names and paths. Prose becomes "text", and of sections that nothing
here reads only the names of their keys stay.
"""
import ast
import json
import pathlib
import re
import shlex
import subprocess
import sys

import yaml

OUR_MODELS = ("qwen2_5vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mistral3", "internvl",
              "glm4v_moe", "kimi_k25", "step3_vl", "qwen3_omni_moe", "qwen3_asr", "wandit", "vace",
              "hunyuanvideo15dit", "ltx2")  # of MindSpeed-MM's
LONGEST_LINE = 120


class Clone:
    """One project's files at HEAD."""

    def __init__(self, folder, name):
        self.name, [self.path] = name, [path for path in (folder / name, folder / f"{name}.git") if path.is_dir()]
        self.revision = self.git("rev-parse", "HEAD").strip()
        self.files = self.git("ls-tree", "-r", "--name-only", "HEAD").splitlines()

    def git(self, *words):
        return subprocess.run(["git", "-C", str(self.path), *words], capture_output=True, text=True, check=True).stdout

    def read(self, path):
        return self.git("show", f"HEAD:{path.removeprefix('./').lstrip('/')}")

    def has(self, path):
        return path.removeprefix("./").lstrip("/") in self.files

    def matching(self, pattern, *texts):
        """Files of that name whose text has one of the strings."""
        found = [path for path in self.files if re.fullmatch(pattern, path)]
        return [path for path in found if any(text in self.read(path) for text in texts)]


def fact(value):
    """Without prose."""
    if isinstance(value, dict):
        return {str(key): fact(each) for key, each in value.items()}
    if isinstance(value, list):
        return [fact(each) for each in value]
    prose = isinstance(value, str) and (len(value) > 100 or not value.isascii() or "\n" in value
                                        or len(value.split()) > 8)
    return "text" if prose else value


def yaml_of(text):
    """One file has an anchor twice, which PyYAML refuses."""
    for name in set(re.findall(r"&(\w+)", text)):
        first, *later = re.split(rf"&{name}\b", text)
        text = first + (f"&{name}" + "".join(later) if later else "")
    return yaml.safe_load(text)


def keys_alone(section):
    return {key: None for key in section} if isinstance(section, dict) else section


def shell_sum(text, values):
    """$((a * b)); empty where the machine says a part of it."""
    numbers = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: values.get(name[1]) or "?", text)
    return str(int(eval(numbers.replace("/", "//")))) if re.fullmatch(r"[\d\s*/()+-]+", numbers) else ""


def shell_value(text, values):
    text = re.sub(r"\$\(\(([^)]*)\)\)", lambda found: shell_sum(found[1], values), text)
    return re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], ""), text)


def variables(script):
    """The assignments of a script: quoted ones over several lines, too, with words in quotes of their own."""
    values = {"NNODES": "1", "NODE_RANK": "0"}  # where a machine's files say it
    quoted, plain = r'"((?:[^"`]|(?<= )"[\w.,]+")*)"', r'((?:\$\(\([^)]*\)\)|[^\s#"`])*)'
    for name, quoted, plain in re.findall(rf"^[ \t]*(?:export )?(\w+)=(?:{quoted}|{plain})", script, re.M):
        if re.match(r"\$\([^(]", plain):  # what a command prints
            continue
        values[name] = shell_value(quoted or plain, values).replace("\\\n", " ").replace('"', "")
    return values


def command_of(script):
    """The words behind `torchrun ...`, with variables replaced."""
    values = variables(script)
    line = re.search(r"^(?:.* )?torchrun ((?:.*\\\n)*.*)", script, re.M)[1]
    line = re.sub(r"2>&1.*|\|.*", "", line.replace("\\\n", " "))
    return shlex.split(shell_value(line, values).replace("\\", " ")), values


def flags_of(words):
    """[[flag, value, ...], ...]"""
    flags = []
    for word in words:
        if word.startswith("--"):
            flags.append([word])
        elif flags:
            flags[-1].append(word)
    return flags


def model_id(section):
    """The model's name, which Megatron core's route gives to the decoder, and that of diffusion to the predictor."""
    if not isinstance(section, dict):
        return None
    return section.get("model_id") or model_id(section.get("text_decoder") or section.get("predictor"))


def mindspeed_sections(data, model):
    """Whole of our families, names of keys of others."""
    ours = model_id(model) in OUR_MODELS
    brief = {key: value if key == "model_id" else None for key, value in (model or {}).items()}
    return {"data": fact(data) if ours else keys_alone(data), "model": fact(model) if ours else brief}


def mindspeed_script(clone, path):
    words, values = command_of(clone.read(path))
    program = next(word for word in words if word.endswith(".py"))
    entry = {"name": path, "program": program, "ranks": int(values.get("WORLD_SIZE") or 16)}
    configuration = next((word for word in words if word.endswith((".yaml", ".yml")) and
                          not words[words.index(word) - 1].startswith("--")), None)
    entry["flags"] = flags_of(words[words.index(program) + 1:])
    named = {flag: value for flag, value, *_ in (each + [None] for each in entry["flags"])}
    if configuration:
        entry |= mindspeed_file(clone, configuration)
        return entry | {"kind": "native" if "training" in entry["file"] else "yaml"}
    read = {key: json.loads(clone.read(named[f"--mm-{key}"])) for key in ("data", "model")
            if clone.has(named.get(f"--mm-{key}") or "")}
    sections = mindspeed_sections(read.get("data"), read.get("model"))
    return entry | {"kind": "flags", **sections, "fsdp2": yaml_of(clone.read(named["--fsdp2-config-path"]))}


def mindspeed_file(clone, path):
    file = yaml_of(clone.read(path))
    others = {key: fact(value) for key, value in file.items() if key not in ("data", "model")}
    entry = {"file": others | mindspeed_sections(file.get("data"), file.get("model"))}
    if (named := file.get("gpt_args", {}).get("fsdp2_config_path")) and clone.has(named):
        entry["fsdp2"] = yaml_of(clone.read(named))
    return entry


def mindspeed(clone):
    entries = [mindspeed_script(clone, path) for path in
               clone.matching(r"(examples|tests/st)/.*\.sh", "--use-torch-fsdp2", "NON_MEGATRON=true", "_sft_")]
    read = " ".join(clone.read(entry["name"]) for entry in entries)
    for path in clone.matching(r"(examples|tests/st)/.*\.yaml", "gpt_args", "fsdp_plan"):
        if path not in read:  # no script names it
            entry = {"name": path, "program": "", "ranks": 16, "flags": [], **mindspeed_file(clone, path)}
            entries.append(entry | {"kind": "native" if "training" in entry["file"] else "yaml"})
    return entries


def roll(clone):
    entries = []
    for path in clone.matching(r"(examples|tests)/.*\.yaml", "fsdp2_train", "fsdp2_infer"):
        file = yaml_of(clone.read(path))
        workers = {key: value["strategy_args"].get("strategy_name") for key, value in file.items()
                   if isinstance(value, dict) and "strategy_args" in value}
        for role, strategy in workers.items():
            if not str(strategy).startswith("fsdp2"):
                continue
            kept = {key: fact(value) if key == role or not isinstance(value, (dict, list)) or key == "defaults" else
                    {"strategy_args": {"strategy_name": workers[key]}} if key in workers else keys_alone(value)
                    for key, value in file.items()}
            entry = {"name": path, "kind": "roll", "role": role, "file": kept}
            for each in file.get("defaults", []):
                name = str(pathlib.PurePosixPath(path).parent / each.split("@")[0]) + ".yaml"
                parts = []
                for part in name.split("/"):
                    parts = parts[:-1] if part == ".." else [*parts, part]
                entry["defaults"] = {each.split("@")[0]: keys_alone(yaml_of(clone.read("/".join(parts))))}
            entries.append(entry)
    return entries


def megatron(clone):
    entries = []
    for path in clone.matching(r".*\.(yaml|sh)", "use-torch-fsdp2"):
        arguments = yaml_of(clone.read(path))["MODEL_ARGS"]
        flags = [[flag] if value is True else [flag, *str(value).split()] for flag, value in arguments.items()]
        entries.append({"name": path, "kind": "megatron", "flags": flags})
    return entries


def titan_value(node):
    """A constant, a sum of constants, or a call as {"call": name, keywords}."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        words = [titan_value(word) for word in node.args]
        return {"call": name, **({"words": words} if words else {}),
                **{word.arg: titan_value(word.value) for word in node.keywords if word.arg}}
    if isinstance(node, ast.List):
        return [titan_value(each) for each in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if all(isinstance(each, (ast.BinOp, ast.Constant, ast.operator)) for each in ast.walk(node)):
        return eval(compile(ast.Expression(node), "", "eval"))
    return "text"


def titan_configuration(functions, name, cache):
    """What a function of config_registry.py returns; those that change another's are followed."""
    if name in cache:
        return json.loads(json.dumps(cache[name]))
    values, result = {}, None
    for step in functions[name].body:
        if isinstance(step, ast.Assign):
            target = ast.unparse(step.targets[0])
            value = step.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) in functions:
                values[target] = titan_configuration(functions, ast.unparse(value.func), cache)
            elif "." in target and target.split(".")[0] in values:
                *path, last = target.split(".")
                where = values[path[0]]
                for part in path[1:]:
                    where = where.setdefault(part, {})
                where[last] = titan_value(value)
            else:
                values[target] = titan_value(value)
        if isinstance(step, ast.Return):
            result = values[step.value.id] if isinstance(step.value, ast.Name) else titan_value(step.value)
    for key, value in result.items():
        if value == "text" and key in values:
            result[key] = values[key]
    cache[name] = result
    return json.loads(json.dumps(result))


def torchtitan(clone):
    path = "torchtitan/models/llama3/config_registry.py"
    functions = {each.name: each for each in ast.parse(clone.read(path)).body if isinstance(each, ast.FunctionDef)}
    cache, entries = {}, []
    for name in functions:
        keys = fact(titan_configuration(functions, name, cache))
        keys.pop("loss")
        keys.get("validator", {}).pop("dataloader", None)
        entries.append({"name": f"{path}:{name}", "kind": "titan", "keys": keys})
    return entries


def written(value):
    """JSON in lines that are not too long."""
    lines, line = [], ""
    for token in json.JSONEncoder(separators=(",", ":")).iterencode(value):
        if len(line) + len(token) > LONGEST_LINE:
            lines.append(line)
            line = ""
        line += token
    return "\n".join([*lines, line])


def main():
    folder = pathlib.Path(sys.argv[1])
    revisions, entries = {}, []
    for repository, read in (("Ascend/MindSpeed-MM", mindspeed), ("alibaba/ROLL", roll),
                             ("NVIDIA/Megatron-LM", megatron), ("pytorch/torchtitan", torchtitan)):
        clone = Clone(folder, repository.split("/")[1])
        revisions[repository] = clone.revision
        entries += [{"repository": repository, **entry} for entry in read(clone)]
    print('{"revisions":' + written(revisions) + ',\n"entries":[')
    print(",\n".join(written(entry) for entry in entries) + "]}")


if __name__ == "__main__":
    main()
