"""torchtitan's configurations by their meaning: which flag of ours is which of its keys."""

# Its key: our flag. A key that is not here has no part in what is learnt.
FLAGS = {"lr_scheduler.warmup_steps": "--lr-warmup-iters", "metrics.log_freq": "--log-interval",
         "training.max_norm": "--clip-grad", "parallelism.tensor_parallel_degree": "--tensor-model-parallel-size",
         "parallelism.context_parallel_degree": "--context-parallel-size",
         "parallelism.pipeline_parallel_degree": "--pipeline-model-parallel-size"}
CONVERTERS = {"Float8LinearConverter.Config": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
              "MXFP8LinearConverter.Config": ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
              "NVFP4LinearConverter.Config": ["--fp4-format", "e2m1"]}
# default_adamw, whose decay is of every parameter.
ADAMW = ["--adam-beta1", 0.9, "--adam-beta2", 0.95, "--weight-decay", 0.1, "--param-group-overrides", "*:wd_mult=1"]
LINEARS = {"wq": ["q_proj"], "wkv": ["k_proj", "v_proj"], "wo": ["o_proj"]}


def value_of(keys, path):
    for part in path.split("."):
        keys = keys.get(part) if isinstance(keys, dict) else None
    return keys


def schedule(keys, steps):
    """Stable, then a decay over the last part; without decay_ratio a decay from the warm-up on."""
    of = keys.get("lr_scheduler", {})
    share = of.get("decay_ratio")
    kind = of.get("decay_type", "linear")
    least = ["--min-lr", value_of(keys, "optimizer.lr") * of.get("min_lr_factor", 0)]
    if share is None:
        return ["--lr-decay-style", kind, *least]
    return ["--lr-decay-style", "WSD", "--lr-wsd-decay-style", kind, "--lr-wsd-decay-iters",
            max(1, round(steps * share)), *least]


def titan_run(keys, folder, workshop, ranks, steps):
    length = 32
    per_rank = value_of(keys, "training.num_tokens_per_microbatch_per_dp_rank") // value_of(
        keys, "training.max_context_length")
    words = ["pretrain", "--hf-model", workshop.model("llama"), "--from-scratch", "--data-path", workshop.documents(),
             "--use-torch-fsdp2", "--ckpt-format", "torch_dcp", "--seq-length", length, "--micro-batch-size",
             min(2, per_rank), "--train-iters", steps, "--lr", value_of(keys, "optimizer.lr"), *ADAMW,
             *schedule(keys, steps)]
    for key, flag in FLAGS.items():
        value = value_of(keys, key)
        if value is not None:
            degree = "parallel" in key
            words += [flag, min(ranks, value) if degree else 0 if flag == "--lr-warmup-iters" else value]
    if keys.get("validator"):
        words += ["--split", "90,10,0", "--eval-interval", steps, "--eval-iters", 1]
    else:
        words += ["--split", "1,0,0", "--eval-iters", 0]
    if keys.get("checkpoint"):
        words += ["--save", folder / "save", "--save-interval", steps]
    for each in keys["model_spec"].get("converters", []):
        if each["call"] == "LoRAConverter.Config":
            targets = [name for target in each["target_modules"] for name in LINEARS[target]]
            words += ["--lora-r", each["rank"], "--lora-alpha", each["alpha"], "--lora-target-modules", *targets]
        else:
            words += CONVERTERS[each["call"]]
            if each.get("fqns") == "text":  # computed: the leading layers
                words += ["--first-last-layers-bf16", "--num-layers-at-start-in-bf16", 0]
    if keys["model_spec"].get("attn_backend") in ("varlen", "flex"):  # attention inside a document
        words += ["--reset-attention-mask", "--reset-position-ids", "--tokenizer-type", "NullTokenizer",
                  "--vocab-size", 63]
    if "--lora-r" in words:  # whose first weights are random there, as the model's are here
        words.remove("--from-scratch")
    recompute = keys.get("activation_checkpoint", {}).get("call")
    plan = "param_dtype: bf16\nreduce_dtype: fp32\n"
    if recompute:
        plan += "use_reentrant: false\nrecompute_modules: ['model.layers.{*}']\n"
    if recompute == "SelectiveAC.Config":  # keeps the products
        plan += "recompute_save_ops: ['aten::mm']\n"
    (folder / "fsdp2.yaml").write_text(plan)
    return [*words, "--fsdp2-config-path", folder / "fsdp2.yaml"]
