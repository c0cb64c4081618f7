"""Runs upstream's own scripts and configurations (golden/upstream_files.json), scaled down to two ranks of a CPU.

Numbers of ranks, batches, lengths and iterations become small, paths those of a folder, models small ones of the same
family. All other flags, keys and values stay as they are.
"""
import copy
import json
import os
import re
import shlex
import sys

import yaml

import megashard
from upstream_models import DIFFUSION_FAMILIES, VISION_FAMILIES, Workshop
from upstream_titan import titan_run

RANKS, STEPS, LENGTH = 2, 2, 128
LENGTHS = {"mistral3": 256}  # the template begins with a long system prompt
FAMILIES = {"qwen2_5vl": "qwen2_5_vl"}  # where MindSpeed-MM has another name
# ROLL's files name models of the hub, and one a folder of its authors.
HUB = (("Qwen3.5-35B-A3B", "qwen3_5_moe"), ("Qwen3-30B-A3B", "qwen3_moe"), ("Qwen3-", "qwen3"),
       ("Qwen2.5-VL", "qwen2_5_vl"), ("Qwen2.5-", "qwen2"), ("/home/", "qwen2_5_vl"))
OF_MINDSPEED = {**VISION_FAMILIES, **DIFFUSION_FAMILIES}
LIST = megashard.ROOT / "tests" / "golden" / "upstream_files.json"


def upstream_list():
    return json.loads(LIST.read_text())


def title(entry):
    """One name for each entry of the list."""
    return entry["name"] + (f" ({entry['role']})" if "role" in entry else "")


def is_here(entry):
    """True if this program supports the model's family."""
    if entry["kind"] == "roll":
        named = " ".join(str(entry["file"].get(key, "")) for key in ("pretrain", "student_pretrain"))
        return any(mark in named for mark, _ in HUB)
    if entry["kind"] in ("flags", "yaml", "native"):
        return family_of(entry.get("model") or entry.get("file", {}).get("model")) in OF_MINDSPEED
    return True


def run_entry(entry, folder, workshop=None):
    """(result, reasons, output): "runs", or "refused" with its sentences."""
    folder.mkdir(parents=True)
    workshop = workshop or Workshop(folder)
    kind = {"flags": mindspeed_flags, "yaml": mindspeed_yaml, "native": mindspeed_native, "roll": roll_worker,
            "megatron": megatron_flags, "titan": titan_flags}[entry["kind"]]
    words = kind(copy.deepcopy(entry), folder, workshop)
    done = run(words)
    command = re.search(r"run `(.*launch/preprocess/preprocess_(?:data|latents|ltx2)\.py [^`]*)`", done.stderr)
    if done.returncode == megashard.USAGE and command:  # what the message says a user must do first
        prepare(command[1])
        done = run(words)
    out = done.stdout + done.stderr
    if done.returncode == 0:
        return "runs", [], out
    is_known = "is not supported; known are: " not in done.stderr  # the family of a model's config.json
    if is_known:
        assert done.returncode == megashard.USAGE, f"{title(entry)}: exit code {done.returncode}\n{out[-4000:]}"
    return "refused", reasons(done.stderr, folder, workshop), out


def run(words):
    return megashard.run(*megashard.launch(RANKS, *words), expect=None, timeout=300)


def prepare(command):
    python = shlex.quote(sys.executable)
    megashard.run("sh", "-c", command.replace("python ", python + " "), cwd=megashard.ROOT)


def reasons(text, *folders):
    """The sentences of a refusal, without this machine's paths."""
    text = text[text.index("megashard: error: ") + len("megashard: error: "):]
    for folder in folders:
        text = text.replace(str(getattr(folder, "folder", folder)), "DIR")
    text = re.sub(r"^rank \d+: ", "", text)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[1:] if re.match(r"\d+ things must change:", lines[0]) else lines[:1]


def write_yaml(path, content):
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def finish(words, folder):
    return [str(word) for word in words] + ["--metrics-file", str(folder / "metrics.jsonl"), "--peak-tflops", "1"]


def family_of(model):
    """The family of a model section; the file's own name if it is not supported."""
    model = model or {}
    predictor = model.get("predictor")
    if isinstance(predictor, dict):
        if predictor["model_id"] == "hunyuanvideo15dit":
            return f"hunyuan_{model['task']}"
        return "vace" if predictor["model_id"] == "vace" else f"wan_{predictor['in_dim']}"
    name = model.get("model_id") or (model.get("text_decoder") or {}).get("model_id")
    return FAMILIES.get(name, name or "another")


def scaled_data(data, family, folder, workshop):
    """A data section: its files lie in the folder, its preprocessing has one process."""
    parameters = (data or {}).get("dataset_param")
    if not parameters:
        return data
    if family in DIFFUSION_FAMILIES:
        return scaled_videos(data, family, folder, workshop)
    file = folder / "data" / "chats.json"
    workshop.records(family, file)
    basic = parameters["basic_parameters"]
    if parameters["dataset_type"] == "multimodal":  # tiles
        parameters["tokenizer_config"]["from_pretrained"] = str(workshop.model(family))
        parameters |= {"patch_size": 4, "image_size": 16}
        basic |= {"data_path": str(file), "data_folder": str(file.parent)}
        return data
    parameters["preprocess_parameters"]["model_name_or_path"] = str(workshop.model(family))
    basic |= {"dataset": str(file), "dataset_dir": str(file.parent), "cache_dir": str(folder / "cache"),
              "preprocessing_num_workers": 1}
    if "cutoff_len" in basic:
        basic["cutoff_len"] = LENGTH
    return data


def scaled_videos(data, family, folder, workshop):
    """A data section of a diffusion model: a few small videos, or features."""
    parameters = data["dataset_param"]
    if family == "ltx2":
        parameters["basic_parameters"]["dataset_dir"] = str(workshop.precomputed(folder / "precomputed"))
        return data
    basic, tokenizers = parameters["basic_parameters"], parameters["tokenizer_config"]
    for tokenizer in tokenizers if isinstance(tokenizers, list) else [tokenizers]:
        tokenizer |= {"from_pretrained": str(workshop.pipeline(family) / "tokenizer")}
        if "byt5_max_length" not in tokenizer:
            tokenizer["model_max_length"] = 12
    if parameters["dataset_type"] == "feature":
        features = workshop.latents(family, folder / "features")
        basic |= {"data_path": str(features / "data.jsonl"), "data_folder": f"{features}/"}
    else:
        (folder / "clips").mkdir()
        basic["data_path"] = str(workshop.clips(folder / "clips"))
    parameters["preprocess_parameters"] |= {"num_frames": 5, "max_height": 32, "max_width": 48, "max_hxw": 32 * 48}
    return data


def scaled_predictor(model, family, workshop):
    """A model section of a diffusion model."""
    config = json.loads((workshop.model(family) / "config.json").read_text())
    if family == "ltx2":
        model |= {key: str(workshop.pipeline(family) / "ltx-2.safetensors")
                  for key in ("model_name_or_path", "checkpoint_path")}
        model["transformer"] |= {key: config[key] for key in model["transformer"] if key in config}
        return model
    if family.startswith("hunyuan"):
        sizes = {"mm_double_blocks_depth": "num_layers", "num_heads": "num_attention_heads",
                 "out_channels": "out_channels", "text_states_dim": "text_embed_dim",
                 "vision_states_dim": "image_embed_dim"}
        model["predictor"] |= {ours: config[theirs] for ours, theirs in sizes.items()}
        model["ae"]["from_pretrained"] = str(workshop.pipeline(family) / "vae/diffusion_pytorch_model.safetensors")
        return model
    sizes = {"num_layers": "num_layers", "ffn_dim": "ffn_dim", "freq_dim": "freq_dim", "text_dim": "text_dim",
             "num_heads": "num_attention_heads", "in_dim": "in_channels", "out_dim": "out_channels"}
    model["predictor"] |= {ours: config[theirs] for ours, theirs in sizes.items()}
    if "from_pretrained" in model["predictor"]:
        model["predictor"]["from_pretrained"] = str(workshop.model(family))
    for part, name in (("text_encoder", "text_encoder"), ("ae", "vae")):
        if part in model:
            model[part]["from_pretrained"] = str(workshop.pipeline(family) / name)
    return model


def scaled_model(model, family, workshop):
    """A model section: sizes are those of the small model where they describe it, folders its own."""
    if family in DIFFUSION_FAMILIES:
        return scaled_predictor(model, family, workshop)
    if family not in VISION_FAMILIES:
        return model
    for key in ("init_from_hf_path", "model_name_or_path"):
        if key in model:
            model[key] = str(workshop.model(family))
    if "init_from_hf_path" not in model and "text_decoder" in model:
        config = json.loads((workshop.model(family) / "config.json").read_text())
        text, vision = config.get("text_config", config), config["vision_config"]
        names = (("num_layers", "num_hidden_layers", "depth"), ("hidden_size", "hidden_size", "hidden_size"),
                 ("ffn_hidden_size", "intermediate_size", "intermediate_size"),
                 ("num_attention_heads", "num_attention_heads", "num_heads"), ("patch_size", "", "patch_size"),
                 ("num_query_groups", "num_key_value_heads", ""), ("num_moe_experts", "num_experts", ""),
                 ("moe_router_topk", "num_experts_per_tok", ""), ("moe_ffn_hidden_size", "moe_intermediate_size", ""),
                 ("out_hidden_size", "", "out_hidden_size"))
        for ours, in_text, in_vision in names:
            for section, name, source in ((model["text_decoder"], in_text, text),
                                          (model["image_encoder"]["vision_encoder"], in_vision, vision)):
                if ours in section:
                    section[ours] = source[name]
    return model


def scaled_arguments(arguments, family, folder, workshop):
    """Megatron's arguments by their names, without hyphens."""
    per_rank = int(arguments.get("micro_batch_size", 1))
    small = {"global_batch_size": per_rank * RANKS, "train_iters": STEPS, "save": str(folder / "save"),
             "save_interval": STEPS, "distributed_backend": "gloo", "seq_length": LENGTHS.get(family, LENGTH),
             "fsdp2_config_path": str(folder / "fsdp2.yaml")}
    result = {key: small.get(key, value) for key, value in arguments.items()}
    if "expert_model_parallel_size" in result:
        result["expert_model_parallel_size"] = RANKS // result.get("tensor_model_parallel_size", 1)
    if "load" in result and family in DIFFUSION_FAMILIES and family.startswith("hunyuan"):
        result["load"] = str(workshop.model(family))
    elif "load" in result and family in OF_MINDSPEED:
        form = result.get("ckpt_format", "torch_dcp")  # Megatron core's route loads Hugging Face weights itself
        result["load"] = str(workshop.model(family) if form == "torch" else workshop.checkpoint(family, form))
    return result


def as_words(arguments):
    words = []
    for key, value in arguments.items():
        words += [f"--{key.replace('_', '-')}", *map(str, [] if value is True else
                                                     value if isinstance(value, list) else [value])]
    return words


def as_arguments(flags):
    return {flag[2:].replace("-", "_"): True if not words else words[0] if len(words) == 1 else words
            for flag, *words in flags}


def mindspeed_flags(entry, folder, workshop):
    family = family_of(entry["model"])
    arguments = scaled_arguments(as_arguments(entry["flags"]), family, folder, workshop)
    for key, content in (("data", scaled_data(entry["data"], family, folder, workshop)),
                         ("model", scaled_model(entry["model"], family, workshop)), ("tool", {})):
        if f"mm_{key}" in arguments:
            arguments[f"mm_{key}"] = str(folder / f"{key}.json")
            (folder / f"{key}.json").write_text(json.dumps(content, indent=4))
    if isinstance(entry["fsdp2"].get("sharding_size"), int):
        entry["fsdp2"]["sharding_size"] = min(RANKS, entry["fsdp2"]["sharding_size"])
    write_yaml(folder / "fsdp2.yaml", entry["fsdp2"])
    return finish(["pretrain", *as_words(arguments)], folder)


def scaled_file(entry, folder, workshop):
    file = entry["file"]
    family = family_of(file.get("model"))
    if "data" in file:
        scaled_data(file["data"], family, folder, workshop)
    if "model" in file:
        scaled_model(file["model"], family, workshop)
    return file, family


def mindspeed_yaml(entry, folder, workshop):
    file, family = scaled_file(entry, folder, workshop)
    if "gpt_args" in file:
        file["gpt_args"] = scaled_arguments(file["gpt_args"], family, folder, workshop)
    if "fsdp2" in entry:
        write_yaml(folder / "fsdp2.yaml", entry["fsdp2"])
    flags = scaled_arguments(as_arguments(entry["flags"]), family, folder, workshop)
    return finish(["pretrain", write_yaml(folder / "config.yaml", file), *as_words(flags)], folder)


def mindspeed_native(entry, folder, workshop):
    starts_from_hf = entry["file"]["training"].get("load") == entry["file"]["model"].get("model_name_or_path")
    file, family = scaled_file(entry, folder, workshop)
    training, parallel = file["training"], file.get("parallel") or {}
    training["train_iters"] = STEPS
    if training.get("save"):
        training["save"] = str(folder / "save")
    if training.get("load") and family in VISION_FAMILIES:
        training["load"] = str(workshop.model(family) if starts_from_hf else workshop.checkpoint(family, "torch_dcp"))
    for key in ("expert_parallel_size", "ulysses_parallel_size", "ring_attention_size"):
        if isinstance(parallel.get(key), int):
            parallel[key] = min(RANKS, parallel[key])
    if isinstance(parallel.get("fully_shard_parallel_size"), int):
        parallel["fully_shard_parallel_size"] = min(RANKS, parallel["fully_shard_parallel_size"])
    return finish(["pretrain", write_yaml(folder / "config.yaml", file)], folder)


def roll_worker(entry, folder, workshop):
    file, worker = entry["file"], entry["file"][entry["role"]]
    named = [key for key in ("pretrain", "reward_pretrain", "student_pretrain", "teacher_pretrain") if key in file]
    for key in named:
        family = next(family for mark, family in HUB if mark in file[key])
        file[key] = str(workshop.model(family))
    own = worker.get("model_args", {}).get("model_name_or_path", "").strip("${}")
    of_roles = {"student": "student_pretrain", "teacher": "teacher_pretrain", "critic": "reward_pretrain"}
    used = own or of_roles.get(entry["role"], "pretrain")
    family = os.path.basename(file[used])
    if used not in ("pretrain", own):  # ROLL's pipeline gives the worker its model
        worker["model_args"]["model_name_or_path"] = file[used]
    if isinstance(file.get("resume_from_checkpoint"), str):
        file["resume_from_checkpoint"] = str(workshop.checkpoint(family, "torch_dcp"))
    file |= {key: value for key, value in (("sequence_length", LENGTH), ("prompt_length", LENGTH // 2),
                                           ("response_length", LENGTH // 2)) if key in file}
    worker["device_mapping"] = f"list(range(0,{RANKS}))"
    training, model = worker.get("training_args") or {}, worker.get("model_args") or {}
    if "gradient_accumulation_steps" in training:
        training["gradient_accumulation_steps"] = min(2, training["gradient_accumulation_steps"])
    model["ulysses_size"] = min(RANKS, model.get("ulysses_size", 1))
    strategy = worker["strategy_args"]["strategy_config"]
    if strategy.get("ep_size", 1) > 1:
        strategy |= {"ep_size": RANKS, "efsdp_size": 1}
    if "fsdp_size" in strategy:
        strategy["fsdp_size"] = min(RANKS, strategy["fsdp_size"])
    for name, content in entry.get("defaults", {}).items():
        path = folder / "run" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_yaml((path.parent.resolve() / path.name), content)
    (folder / "run").mkdir(exist_ok=True)
    config = write_yaml(folder / "run" / "config.yaml", file)
    limits = {f"image_{key}": model[key] for key in ("max_pixels", "min_pixels") if key in model}
    if entry["role"] in ("actor_train", "critic", "student"):
        data = workshop.answers(family, **limits)
    else:
        data = workshop.conversations(family, **limits) if family in VISION_FAMILIES else workshop.documents()
    common = ["--config", config, "--role", entry["role"], "--data-path", data]
    if worker["strategy_args"]["strategy_name"] == "fsdp2_infer":
        return [str(word) for word in ["infer", *common, "--log-probs", folder / "log_probs.npy"]]
    return finish(["pretrain", *common, "--train-iters", STEPS, "--split", "1,0,0", "--eval-iters", 0], folder)


def megatron_flags(entry, folder, workshop):
    arguments = as_arguments(entry["flags"])
    small = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32,
             "max_position_embeddings": 32, "data_path": str(workshop.documents(number=1600)), "eval_iters": 1,
             "data_cache_path": str(folder / "cache"), "tensorboard_dir": str(folder / "board"),
             "vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    (folder / "vocab.json").write_text(json.dumps({f"word{number}": number for number in range(60)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    arguments = {key: small.get(key, value) for key, value in scaled_arguments(arguments, "", folder, workshop).items()}
    arguments["load"] = arguments["save"]
    return finish(["pretrain", *as_words(arguments)], folder)


def titan_flags(entry, folder, workshop):
    return finish(titan_run(entry["keys"], folder, workshop, RANKS, STEPS), folder)
