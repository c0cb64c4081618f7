"""Small models, data and checkpoints in place of those that upstream's files name; each is made once."""
import functools
import json
import pathlib

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import megashard
from conversations import write_conversation_set
from latents import write_latents
from tiny_audio import make_asr, make_omni, publish
from tiny_hunyuan import SIZES as HUNYUAN_SIZES, make_hunyuan
from tiny_ltx2 import make_ltx2, write_precomputed
from tiny_vision import (CLASSES, asked, make_glm4v, make_internvl_chat, make_kimi_k25, make_mistral3, make_processors,
                         make_step3, make_vision_model, said, write_conversations)
from tiny_wan import SIZES, WIDTH, make_pipeline, write_video

TEXT_SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, bos_token_id=1,
                  eos_token_id=2, head_dim=8)


def make_published(folder, make):
    make(folder)
    publish(folder)


def make_qwen(folder, family):
    make_processors(folder)
    make_vision_model(folder, family, width=32 if family.endswith("_moe") else 16)  # experts that mxfp8 takes


# Families with pictures or sound: what makes a model with its processors in a folder.
VISION_FAMILIES = {family: functools.partial(make_qwen, family=family) for family in CLASSES}
VISION_FAMILIES |= {"mistral3": make_mistral3, "qwen3_omni_moe": functools.partial(make_published, make=make_omni),
                    "qwen3_asr": functools.partial(make_published, make=make_asr),
                    "internvl": make_internvl_chat, "glm4v_moe": make_glm4v, "kimi_k25": make_kimi_k25,
                    "step3_vl": make_step3}


# Models of latents: channels of the latents, and of what the model takes.
DIFFUSION_FAMILIES = {"wan_16": (16, 16), "wan_36": (16, 36), "wan_48": (48, 48), "vace": (16, 16),
                      "hunyuan_t2v": (4, 9), "hunyuan_i2v": (4, 9), "ltx2": (4, 4)}


class Workshop:
    """Makes models, data and checkpoints in one folder."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    @functools.cache
    def model(self, family):
        """A Hugging Face folder; only a config.json for a family that is not supported."""
        import transformers

        folder = self.folder / "models" / family
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        text = {"qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
                "llama": ("LlamaConfig", "LlamaForCausalLM",
                          dict(hidden_size=32, intermediate_size=64)),  # which mxfp8 takes
                "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                              dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16))}
        if family in DIFFUSION_FAMILIES:
            return self.pipeline(family) / "transformer"
        if family in VISION_FAMILIES:
            VISION_FAMILIES[family](folder)
        elif family in text:
            config, model, more = text[family]
            config = getattr(transformers, config)(**{**TEXT_SIZES, **more}, tie_word_embeddings=False)
            getattr(transformers, model)(config).save_pretrained(folder)
        else:
            (folder / "config.json").write_text(json.dumps({"model_type": family, "architectures": [family]}))
        return folder

    @functools.cache
    def pipeline(self, family):
        """A folder of diffusers with encoders and two transformers."""
        import diffusers

        folder, (channels, taken) = self.folder / "pipelines" / family, DIFFUSION_FAMILIES[family]
        if family == "ltx2":
            make_ltx2(folder)
            return folder
        if family.startswith("hunyuan"):
            make_hunyuan(folder, f"HunyuanVideo15{'ImageToVideo' if family.endswith('i2v') else ''}Pipeline")
            diffusers.HunyuanVideo15Transformer3DModel(**HUNYUAN_SIZES).save_pretrained(folder / "transformer")
            return folder
        if family == "wan_36":
            make_pipeline(folder, "WanImageToVideoPipeline", image_encoder=None, image_processor=None)
        else:
            make_pipeline(folder, "WanVACEPipeline" if family == "vace" else "WanPipeline", channels,
                          **{"expand_timesteps": True} if family == "wan_48" else {})
        for name in ("transformer", "transformer_2"):
            if family == "vace":
                model = diffusers.WanVACETransformer3DModel(**SIZES, vace_layers=[0, 1], vace_in_channels=96)
            else:
                model = diffusers.WanTransformer3DModel(**SIZES, in_channels=taken, out_channels=channels)
            model.save_pretrained(folder / name)
        return folder

    def precomputed(self, folder):
        """Features in the form of LTX-2's trainer."""
        return write_precomputed(folder)

    def latents(self, family, folder):
        """Features in the form of MindSpeed-MM's."""
        draw, (channels, _) = torch.Generator().manual_seed(0), DIFFUSION_FAMILIES[family]
        sample = lambda: {"video": torch.randn(channels, 2, 4, 6, generator=draw), "prompt_mask": None,
                          "prompt_ids": [torch.randn(12, WIDTH, generator=draw)]}
        more = {"vace_context": torch.zeros(96, 2, 4, 6)} if family == "vace" else {}
        return write_latents(folder, [sample() | more for _ in range(8)], says_shape=False)

    def clips(self, folder):
        """Videos and captions in the form of MindSpeed-MM's."""
        for number in range(4):
            write_video(folder / str(number), 5, 32, 48, (50 * number, 0, 200))
        records = [{"path": str(number), "cap": ["a red ball"]} for number in range(4)]
        (folder / "clips.json").write_text(json.dumps(records))
        (folder / "data.txt").write_text(f"{folder},{folder}/clips.json\n")
        return folder / "data.txt"

    @functools.cache
    def checkpoint(self, family, form):
        """A checkpoint of the model, made by `convert`, to be loaded."""
        folder = self.folder / "checkpoints" / f"{family}_{form}"
        target = "--dcp-dir" if form == "torch_dcp" else "--save-dir"
        megashard.convert(f"hf_to_{form.replace('torch_', '') if form == 'torch_dcp' else form}", "--hf-dir",
                          self.model(family), target, folder)
        return folder

    @functools.cache
    def documents(self, vocabulary=60, number=400):
        prefix = self.folder / f"text_{vocabulary}_{number}"
        random = numpy.random.RandomState(0)
        megashard.write_documents(prefix, [random.randint(3, vocabulary, random.randint(20, 60))
                                           for _ in range(number)])
        return prefix

    @functools.cache
    def conversations(self, family, **limits):
        """Prepared by the model's chat template."""
        prefix = self.folder / f"chats_{family}"
        folder = self.model(family)
        write_conversations(folder, [[asked([{"type": "image", "image": "a.png"}, {"type": "text", "text": "the cat"}]),
                                      said("sat on the mat")]] * 16, prefix, **limits)
        return prefix

    @functools.cache
    def answers(self, family, **limits):
        """Sampled answers to prompts, with the columns that losses read."""
        prefix = self.folder / f"answers_{family}"
        random = torch.Generator().manual_seed(0)
        source = prefix
        if family in VISION_FAMILIES:
            source = self.conversations(family, **limits)
        else:
            texts = [torch.randint(3, 60, (40,), generator=random) for _ in range(16)]
            write_conversation_set(prefix, texts, [[0] * 10 + [1] * 30] * 16)
        with safe_open(f"{source}.vision.safetensors", "pt") as file:
            chats, facts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        values = torch.randn(2, len(chats["tokens"]), generator=random)
        save_file({**chats, "column.advantages": values[0].contiguous(), "column.ref_log_probs": -values[1].exp(),
                   "column.returns": values[0].clone(),
                   "column.teacher_topk_log_probs": -values.abs().t().contiguous(),
                   "column.teacher_topk_ids": torch.stack([chats["tokens"], chats["tokens"].roll(1)], 1)},
                  f"{prefix}.vision.safetensors", facts)
        return prefix

    def records(self, family, path):
        """A data set in the form of MindSpeed-MM's examples."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if family == "qwen3_asr":
            record = {"audio": str(self.model(family) / "a.wav"), "prompt": "on the mat", "text": "the cat sat"}
            path.write_text(json.dumps([record] * 24))
            return
        (path.parent / "a.png").write_bytes((self.model(family) / "a.png").read_bytes())
        said = "<image> the cat", "sat on the mat"
        if family == "internvl":
            turns = [{"from": role, "value": text} for role, text in zip(("human", "gpt"), said)]
            record = {"conversations": turns, "image": "a.png"}
        else:
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said)]
            record = {"messages": turns, "images": ["a.png"]}
        path.write_text(json.dumps([record] * 24))
