"""Step3-VL, which transformers does not have: the tower of its Step 3.7 before its Qwen3."""
import json

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

NAMES = {"embeddings.patch_embedding.": "conv1.", "embeddings.position_embedding.weight": "positional_embedding",
         "pre_layernorm": "ln_pre", "vision_model.layers.": "vision_model.transformer.resblocks.",
         "downsampler": "vit_downsampler", "lambda_1": "ls_1.gamma", "lambda_2": "ls_2.gamma", "mlp.fc1": "mlp.c_fc",
         "mlp.fc2": "mlp.c_proj", "self_attn": "attn", "layernorm_before": "ln_1", "layernorm_after": "ln_2"}


class StepTwin(torch.nn.Module):
    def __init__(self, text, vision, image_token):
        super().__init__()
        self.config, self.image_token = Qwen3Config(**text), image_token
        self.sizes = dict(vision, hidden_act="quick_gelu", layer_norm_eps=1e-5)
        config = Step3p7VisionConfig(**self.sizes, rope_parameters=dict(rope_type="axial", rope_theta=10000.0))
        self.vision_model = Step3p7VisionModel._from_config(config)
        self.vit_large_projector = torch.nn.Linear(4 * config.hidden_size, self.config.hidden_size, bias=False)
        self.language = Qwen3ForCausalLM(self.config)

    def forward(self, input_ids, pixel_values=None, image_grid_thw=None, **more):
        embedded = self.language.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            features = [self.vit_large_projector(self.vision_model(tile).last_hidden_state)[0]
                        for tile in self.tiles(pixel_values, image_grid_thw)]
            places = (input_ids == self.image_token)[..., None]
            embedded = embedded.masked_scatter(places, torch.cat(features))
        return self.language(inputs_embeds=embedded, **more)

    @staticmethod
    def tiles(pixels, grids):
        """Of our pixels, whose patches of 4 x 4 lie in units of 4 x 4."""
        for patches, (_, side, _) in zip(pixels.split(grids.prod(1).tolist()), grids.tolist()):
            units = patches.view(side // 4, side // 4, 4, 4, 3, 4, 4)
            yield units.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, 4 * side, 4 * side)

    def published(self, named):
        """By the names of the published files, which join q, k and v, and turn neighbours among channels."""
        joined, heads = {}, self.vision_model.config.num_attention_heads
        for name, value in named:
            if name.startswith("language."):
                yield name.removeprefix("language."), value
                continue
            for ours, theirs in NAMES.items():
                name = name.replace(ours, theirs)
            kind = next((kind for kind in "qkv" if f".attn.{kind}_proj." in name), None)
            if kind is None:
                yield name, value
                continue
            if kind in "qk":
                value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
            joined.setdefault(name.replace(f"{kind}_proj.", "in_proj_"), []).append((kind, value))
        for name, parts in joined.items():
            yield name, torch.cat([dict(parts)[kind] for kind in "qkv"])

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        sizes = self.sizes
        vision = dict(width=sizes["hidden_size"], layers=sizes["num_hidden_layers"], heads=sizes["num_attention_heads"],
                      mlp_ratio=sizes["mlp_ratio"], image_size=sizes["image_size"], patch_size=sizes["patch_size"],
                      hidden_act="quick_gelu", layer_norm_eps=1e-5, use_cls_token=False, ls_init_value=0.1)
        (folder / "config.json").write_text(json.dumps(dict(
            model_type="step_robotics", architectures=["Step3VL10BForCausalLM"], text_config=self.config.to_dict(),
            vision_config=vision, image_token_id=self.image_token, projector_bias=False, tie_word_embeddings=False)))
        save_file({name: value.contiguous() for name, value in self.published(self.state_dict().items())},
                  folder / "model.safetensors", metadata={"format": "pt"})

    def gradients(self):
        """By our names."""
        named = [(name, parameter.grad) for name, parameter in self.named_parameters()]
        for name, value in self.published(named):
            if name.startswith("model."):
                name = name.replace("model.", "model.language_model.", 1)
            elif name != "lm_head.weight":
                name = f"model.{name}"
            yield name, value
