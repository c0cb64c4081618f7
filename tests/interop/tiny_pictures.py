"""Small pipelines that draw pictures, with random weights."""
import torch

from tiny_hunyuan import qwen_sizes
from tiny_wan import make_tokenizer

TEXT, POOLED = 16, 12


def make_flux(folder):
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(4, 4), norm_num_groups=2, layers_per_block=1, latent_channels=3,
                                  down_block_types=("DownEncoderBlock2D",) * 2, use_quant_conv=False,
                                  up_block_types=("UpDecoderBlock2D",) * 2, use_post_quant_conv=False,
                                  shift_factor=0.1, scaling_factor=0.4)
    clip = CLIPTextConfig(vocab_size=16, hidden_size=POOLED, intermediate_size=16, num_hidden_layers=1,
                          num_attention_heads=2, max_position_embeddings=20, eos_token_id=1)
    t5 = T5Config(vocab_size=16, d_model=TEXT, d_kv=6, d_ff=16, num_layers=1, num_heads=2)
    short = make_tokenizer()
    short.model_max_length = 20
    pipeline = diffusers.FluxPipeline(
        vae=vae, text_encoder=CLIPTextModel(clip).eval(), tokenizer=short, text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=make_tokenizer(), transformer=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    pipeline.save_pretrained(folder)
    return pipeline


def make_qwen_image(folder):
    import diffusers
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=TEXT)
    config = Qwen2_5_VLConfig(text_config=qwen_sizes(TEXT), vision_config=vision)
    pipeline = diffusers.QwenImagePipeline(
        vae=vae, text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(), tokenizer=make_tokenizer(),
        transformer=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    pipeline.save_pretrained(folder)
    return pipeline
