"""Small pipelines of HunyuanVideo 1.5 with random weights."""
import torch

from tiny_wan import make_tokenizer

TEXT, LETTERS, PICTURE, CHANNELS = 16, 12, 8, 4  # widths of features, channels of latents
SIZES = dict(in_channels=2 * CHANNELS + 1, out_channels=CHANNELS, num_attention_heads=2, attention_head_dim=12,
             num_layers=2, num_refiner_layers=1, text_embed_dim=TEXT, text_embed_2_dim=LETTERS,
             image_embed_dim=PICTURE, rope_axes_dim=(4, 4, 4))
# As many words before the caption as the pipeline cuts off.
TEMPLATE = ("{% for message in messages %}{% if message['role'] == 'user' %}" + "a " * 108 +
            "{{ message['content'] }} box{% endif %}{% endfor %}")


def qwen_sizes(width):
    """Of Qwen2.5-VL's text."""
    return dict(vocab_size=16, hidden_size=width, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=2048,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]})


def make_encoders():
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.chat_template = TEMPLATE
    qwen = Qwen2_5_VLTextConfig(**qwen_sizes(TEXT))
    letters = T5Config(vocab_size=384, d_model=LETTERS, d_kv=6, d_ff=16, num_layers=1, num_heads=2,
                       feed_forward_proj="gated-gelu")
    return dict(text_encoder=Qwen2_5_VLTextModel(qwen).eval(), tokenizer=tokenizer,
                text_encoder_2=T5EncoderModel(letters).eval(), tokenizer_2=ByT5Tokenizer())


def make_picture_encoder():
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(hidden_size=PICTURE, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                image_size=8, patch_size=4)
    return dict(image_encoder=SiglipVisionModel(config).eval(),
                feature_extractor=SiglipImageProcessor(size={"height": 8, "width": 8}))


def make_hunyuan(folder, kind="HunyuanVideo15Pipeline"):
    """Writes the encoders of a pipeline; with an image they see it, too."""
    import diffusers

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLHunyuanVideo15(latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8, 8),
                                                layers_per_block=1)
    more = make_picture_encoder() if "Image" in kind else {}
    pipeline = getattr(diffusers, kind)(
        vae=vae, transformer=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        guider=diffusers.ClassifierFreeGuidance(), **make_encoders(), **more)
    pipeline.save_pretrained(folder)
    return pipeline
