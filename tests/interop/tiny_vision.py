"""Tiny vision-language models of random weights with their processors, two pictures, two videos, and conversations
about them."""
import argparse
import json
import re

import numpy
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = ["<unk>", *MARKS, "user", "assistant", "the", "cat", "sat", "on", "mat", "<", ">", ".", "seconds",
         *"0123456789"]
CLASSES = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5",
           "qwen3_5_moe": "Qwen3_5Moe"}  # of transformers
IMAGE, VIDEO = WORDS.index("<|image_pad|>"), WORDS.index("<|video_pad|>")
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% "
            "else %}"
            "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
            "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c['text'] }}{% "
            "endif %}"
            "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SMALL_TEXT = dict(vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=2, head_dim=8, num_key_value_heads=1, max_position_embeddings=128,
                  initializer_range=0.1, bos_token_id=1, eos_token_id=2)
SMALL_TOWER = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=20, num_attention_heads=2, patch_size=4,
                   initializer_range=0.1)
GROUPED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
               first_k_dense_replace=1)
ASKED = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "the cat"}]}
AGAIN = {"role": "user", "content": [{"type": "text", "text": "on"}, {"type": "image", "image": "b.jpg"}]}
SHOWN = {"role": "user", "content": [{"type": "text", "text": "the mat"}, {"type": "video", "video": "a.mp4"}]}
MIXED = {"role": "user", "content": [{"type": "video", "video": "b.mp4"}, {"type": "image", "image": "a.png"},
                                     {"type": "text", "text": "on"}, {"type": "video", "video": "a.mp4"}]}


def asked(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def make_tokenizer(folder, words, marks, template, **more):
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(marks)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>",
                                   chat_template=template, **more)
    made.save_pretrained(folder)
    return made


def make_processors(folder):
    """Tokenizer, chat template and image processor of Qwen's families, and two pictures."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_tokenizer(folder, WORDS, MARKS, TEMPLATE)
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024).save_pretrained(folder)
    make_pictures(folder)


def make_pictures(folder):
    """Two, one of them rotated."""
    random = numpy.random.RandomState(0)
    sideways = Image.Exif()
    sideways[ExifTags.Base.Orientation] = 6
    for name, size, more in (("a.png", (20, 13, 3), {}), ("b.jpg", (9, 30, 3), {"exif": sideways})):
        Image.fromarray(random.randint(0, 256, size).astype("uint8")).save(folder / name, **more)


def write_video(path, frames, fps, size):
    """Smooth moving pictures: `size` is (rows, columns)."""
    import av
    down, across = numpy.mgrid[:size[0], :size[1]]
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.height, stream.width = size
        for number in range(frames):
            waves = [127 + 120 * numpy.sin((across + 3 * number) / 5 + channel) * numpy.cos(down / 4)
                     for channel in range(3)]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(numpy.stack(waves, -1).astype("uint8"), format="rgb24")))
        file.mux(stream.encode())


def make_videos(folder, family):
    """The video processor for make_processors(), and two videos; returns transformers' combined processor."""
    import transformers
    from transformers import AutoTokenizer, Qwen2VLImageProcessor

    images, tokenizer = Qwen2VLImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if family == "qwen2_5_vl":  # in a file of its own
        videos = transformers.Qwen2VLVideoProcessor(patch_size=4, min_pixels=64, max_pixels=320, do_sample_frames=True,
                                                    fps=2)
        processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, videos)
        videos.save_pretrained(folder)
    else:  # with the others
        videos = transformers.Qwen3VLVideoProcessor(patch_size=4, size={"shortest_edge": 256, "longest_edge": 1200})
        processor = transformers.Qwen3VLProcessor(images, tokenizer, videos)
        processor.save_pretrained(folder)
    write_video(folder / "a.mp4", 9, 4, (20, 24))
    write_video(folder / "b.mp4", 5, 2, (34, 18))
    return processor


def make_vision_model(folder, family="qwen2_5_vl", width=16):
    """Saves a model of a family that sees (of CLASSES) for that vocabulary to the folder."""
    import transformers

    text = dict(SMALL_TEXT, hidden_size=width,
                rope_parameters=dict(rope_type="default", rope_theta=100.0, mrope_section=[2, 1, 1]))
    vision = dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4, out_hidden_size=width,
                  initializer_range=0.1)
    if family == "qwen2_5_vl":
        vision |= dict(window_size=16, fullatt_block_indexes=[1])
    else:
        vision |= dict(num_position_embeddings=16)
    if family.startswith("qwen3_vl"):
        vision |= dict(deepstack_visual_indexes=[0])
    if family.startswith("qwen3_5"):  # a quarter of a head turns
        text |= dict(head_dim=32, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
                     linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=4)
    if family.endswith("_moe"):
        text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width)
    if family == "qwen3_5_moe":
        text |= dict(shared_expert_intermediate_size=12)
    kind = CLASSES[family]
    config = getattr(transformers, f"{kind}Config")(image_token_id=IMAGE, video_token_id=VIDEO, text_config=text,
                                                    vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    made.save_pretrained(folder)
    return made


def make_mistral3(folder):
    """A mistral3 model with processor, and two pictures; returns transformers' processor, and the model."""
    import transformers
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    tokenizer = make_marked_tokenizer(folder, {"<|image_pad|>": "[IMG]", "<|video_pad|>": "[IMG_BREAK]",
                                               "<|vision_start|>": "[IMG_END]"}, "[IMG]")
    limits = dict(patch_size=dict(height=4, width=4), size=dict(longest_edge=26))
    PixtralImageProcessorPil(**limits).save_pretrained(folder)
    make_pictures(folder)
    model = saved(folder, transformers.Mistral3ForConditionalGeneration, transformers.Mistral3Config(
        text_config=dict(SMALL_TEXT, model_type="mistral"), vision_config=SMALL_TOWER, image_token_index=IMAGE,
        tie_word_embeddings=False))
    images = transformers.PixtralImageProcessor(**limits)
    return transformers.PixtralProcessor(images, tokenizer, patch_size=4, spatial_merge_size=2), model


def make_gemma3(folder):
    """The same for gemma3."""
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = dict(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    tokenizer = make_marked_tokenizer(folder, {"<|image_pad|>": names["image_token"],
                                               "<|vision_start|>": names["boi_token"],
                                               "<|vision_end|>": names["eoi_token"]}, names["boi_token"], **names)
    size = dict(size=dict(height=16, width=16))
    Gemma3ImageProcessorPil(**size).save_pretrained(folder)
    make_pictures(folder)
    model = saved(folder, transformers.Gemma3ForConditionalGeneration, transformers.Gemma3Config(
        text_config=SMALL_TEXT | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"],
                                      pad_token_id=0),
        vision_config=SMALL_TOWER | dict(image_size=16, vision_use_head=False), image_token_index=IMAGE,
        mm_tokens_per_image=4, tie_word_embeddings=False))
    return transformers.Gemma3Processor(transformers.Gemma3ImageProcessor(**size), tokenizer, image_seq_length=4), model


def make_internvl(folder, text="qwen3"):
    """The same for internvl: tiles of 16 x 16, of which a picture may be 4 and the whole."""
    import transformers
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    names = dict(start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
                 video_token="<video>")
    tokenizer = make_marked_tokenizer(folder, {"<|image_pad|>": "<IMG_CONTEXT>", "<|vision_start|>": "<img>",
                                               "<|vision_end|>": "</img>", "<|video_pad|>": "<video>"},
                                      "<IMG_CONTEXT>", **names)
    tiles = dict(size=dict(height=16, width=16), crop_to_patches=True, min_patches=1, max_patches=4)
    GotOcr2ImageProcessorPil(**tiles).save_pretrained(folder)
    make_pictures(folder)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16) if text == "qwen3_moe" else {}
    model = saved(folder, transformers.InternVLForConditionalGeneration, transformers.InternVLConfig(
        text_config=SMALL_TEXT | experts | dict(model_type=text), image_token_id=IMAGE, tie_word_embeddings=False,
        vision_config=SMALL_TOWER | dict(image_size=[16, 16])))
    images = transformers.GotOcr2ImageProcessor(**tiles)
    videos = transformers.InternVLVideoProcessor(size=tiles["size"])
    return transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=4), model


def make_internvl_chat(folder):
    """make_internvl() with experts, in the form of InternVLChatModel; transformers' is in the folder part."""
    made = make_internvl(folder, "qwen3_moe")
    (folder / "part").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder / "part" / name)
    write_internvl_chat(folder / "part", folder)
    return made


def write_internvl_chat(source, folder):
    """Writes a model of transformers' InternVL in the form of InternVLChatModel."""
    config = json.loads((source / "config.json").read_text())
    vision, layer = config["vision_config"], "vision_model.encoder.layers."
    names = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization", "hidden_dropout_prob": "dropout",
             "layer_scale_init_value": "initializer_factor"}
    vision |= {theirs: vision.pop(ours) for ours, theirs in names.items()}
    vision |= {key: vision[key][0] for key in ("image_size", "patch_size")}
    chat = dict(model_type="internvl_chat", architectures=["InternVLChatModel"], llm_config=config["text_config"],
                vision_config=vision, downsample_ratio=0.5, force_image_size=vision["image_size"], ps_version="v2",
                select_layer=-1, img_context_token_id=config["image_token_id"], dynamic_image_size=True,
                use_thumbnail=True, min_dynamic_patch=1, max_dynamic_patch=12)
    chat["llm_config"]["tie_word_embeddings"] = config["tie_word_embeddings"]
    weights, fused = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        for ours, theirs in (("vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
                             ("position_embeddings", "position_embedding"),
                             ("patch_embeddings.projection", "patch_embedding"), ("vision_tower.encoder.layer.", layer),
                             ("vision_tower.", "vision_model."), ("multi_modal_projector", "mlp1"),
                             ("mlp1.layer_norm", "mlp1.0"), ("mlp1.linear_1", "mlp1.1"), ("mlp1.linear_2", "mlp1.3")):
            name = name.replace(ours, theirs)
        if name.startswith(layer):
            for ours, theirs in (("attention.projection_layer", "attn.proj"), ("attention.", "attn."),
                                 ("layernorm_before", "norm1"), ("layernorm_after", "norm2"), ("lambda_", "ls")):
                name = name.replace(ours, theirs)
            if ".attn." in name and "_proj." in name:
                fused.setdefault(re.sub(r"[qkv]_proj", "qkv", name), {})[name] = value
                continue
        weights[name] = value
    for name, parts in fused.items():
        weights[name] = torch.cat([parts[name.replace("qkv", f"{part}_proj")] for part in "qkv"])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(chat))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_glm4v(folder):
    """The same for glm4v_moe."""
    import transformers
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    names = dict(image_token="<|image|>", video_token="<|video|>")
    tokenizer = make_marked_tokenizer(folder, {"<|image_pad|>": "<|image|>", "<|video_pad|>": "<|video|>",
                                               "<|vision_start|>": "<|begin_of_image|>",
                                               "<|vision_end|>": "<|end_of_image|>"},
                                      "<|begin_of_image|><|image|><|end_of_image|>", **names)
    limits = dict(patch_size=4, size=dict(shortest_edge=256, longest_edge=1200))
    Glm4vImageProcessorPil(**limits).save_pretrained(folder)
    make_pictures(folder)
    model = saved(folder, transformers.Glm4vMoeForConditionalGeneration, transformers.Glm4vMoeConfig(
        text_config=SMALL_TEXT | GROUPED | dict(head_dim=16, rope_parameters=dict(
            rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5, mrope_section=[1, 2, 1])),
        vision_config=dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4,
                           out_hidden_size=16, image_size=16, initializer_range=0.1),
        image_token_id=IMAGE, video_token_id=VIDEO, tie_word_embeddings=False))
    images, videos = transformers.Glm4vImageProcessor(**limits), transformers.Glm4vVideoProcessor(**limits)
    return transformers.Glm4vProcessor(images, tokenizer, videos), model


def make_kimi_k25(folder):
    """The same for kimi_k25."""
    import transformers
    from transformers_twin import save_published_kimi

    names = dict(image_token="<|media_pad|>", video_token="<|kimi_k25_video_placeholder|>")
    tokenizer = make_marked_tokenizer(folder, {"<|image_pad|>": "<|media_pad|>",
                                               "<|video_pad|>": "<|kimi_k25_video_placeholder|>",
                                               "<|vision_start|>": "<|media_begin|>",
                                               "<|vision_end|>": "<|media_end|>"},
                                      "<|media_begin|><|media_pad|><|media_end|>", **names)
    limits = dict(patch_size=4, max_patches=40, size=dict(max_height=6, max_width=6))
    images = transformers.Kimi_K25ImageProcessor(**limits)
    images.save_pretrained(folder)
    make_pictures(folder)
    torch.manual_seed(0)
    model = transformers.Kimi_K25ForConditionalGeneration(transformers.Kimi_K25Config(
        text_config=SMALL_TEXT | GROUPED | dict(
            model_type="deepseek_v3", num_key_value_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=6, head_dim=4),
        vision_config=SMALL_TOWER | dict(pos_emb_height=3, pos_emb_width=3), projection_hidden_size=16,
        image_token_id=IMAGE, video_token_id=VIDEO, tie_word_embeddings=False))
    save_published_kimi(model, folder)
    return transformers.Kimi_K25Processor(images, tokenizer, transformers.Kimi_K25VideoProcessor(patch_size=4)), model


def make_step3(folder):
    """The same for step_robotics; the model is step_twin.py's."""
    import transformers
    from step_twin import StepTwin

    tokenizer = make_marked_tokenizer(folder, {"<|image_pad|>": "<im_patch>", "<|vision_start|>": "<im_start>",
                                               "<|vision_end|>": "<im_end>", "<|video_pad|>": "<patch_start>"},
                                      "<im_patch>", image_token="<im_patch>")
    images = transformers.Step3p7ImageProcessor(size=dict(height=32, width=32), patch_size=16, max_image_size=64,
                                                vision_patch_size=4)
    images.save_pretrained(folder)
    make_pictures(folder)
    torch.manual_seed(0)
    model = StepTwin(SMALL_TEXT, dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=1.25,
                                      image_size=32, patch_size=4), IMAGE)
    model.save(folder)
    return transformers.Step3p7Processor(images, tokenizer), model


def make_marked_tokenizer(folder, named, in_template, **names):
    """make_tokenizer() with other marks; `in_template`: what the chat template writes for a picture."""
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", in_template)
    return make_tokenizer(folder, [named.get(word, word) for word in WORDS], [named.get(mark, mark) for mark in MARKS],
                          template, extra_special_tokens=names)


def saved(folder, kind, config):
    torch.manual_seed(0)
    model = kind(config)
    model.save_pretrained(folder)
    return model


def whole_images(pixel_values, image_grid_thw):
    """Pixtral's input: patches of 2 x 2 units as images, padded to the largest."""
    heights, widths = (4 * image_grid_thw[:, 1:]).unbind(1)
    images = torch.randn(len(heights), 3, heights.max(), widths.max())
    counts = image_grid_thw.prod(1).tolist()
    for image, patches, height, width in zip(images, pixel_values.split(counts), heights.tolist(), widths.tolist()):
        units = patches.view(height // 8, width // 8, 2, 2, 3, 4, 4)
        image[:, :height, :width] = units.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, height, width)
    return dict(pixel_values=images, image_sizes=torch.stack([heights, widths], 1))


def row_by_row(pixel_values, image_grid_thw):
    """Kimi's input: all patches of a picture by rows, not by units of 2 x 2."""
    images = []
    counts = image_grid_thw.prod(1).tolist()
    for patches, (_, rows, columns) in zip(pixel_values.split(counts), image_grid_thw.tolist()):
        units = patches.view(rows // 2, columns // 2, 2, 2, 3, 4, 4)
        images.append(units.transpose(1, 2).reshape(rows * columns, 3, 4, 4))
    return dict(pixel_values=torch.cat(images), image_grid_thw=image_grid_thw)


def preprocessing(model, **given):
    """The flags of preprocess_data.py --input-format conversations."""
    names = ("conversation_form image_folder template columns cutoff_length image_max_pixels image_min_pixels "
             "video_fps video_num_frames max_length max_samples mask_history training_form skip_bad_records "
             "learn_questions strip_text kto_batch_size disable_thinking fix_mistral_regex").split()
    return argparse.Namespace(**{**dict.fromkeys(names), "tokenizer_model": str(model), "workers": 1,
                                 "input_format": "conversations", "log_interval": 1000, **given})


def write_conversations(folder, conversations, prefix, **flags):
    """PREFIX.vision.safetensors by launch/preprocess/preprocess_conversations.py in this process; the processors are in
    `folder`."""
    file = folder / "conversations.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    from preprocess_conversations import preprocess

    preprocess(preprocessing(folder, input=[str(file)], output_prefix=str(prefix), **flags))
