"""Small pipelines of Wan with random weights, and videos for them."""
import numpy
import torch
from PIL import Image

WIDTH, CHANNELS = 32, 16  # of text features and of latents
SIZES = dict(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, text_dim=WIDTH, freq_dim=16,
             ffn_dim=40, num_layers=2, rope_max_seq_len=32)


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "blue", "ball", "box", "moves"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make_pipeline(folder, kind="WanPipeline", channels=CHANNELS, **more):
    """Writes the encoders of a pipeline: a VAE, umT5 of `WIDTH`."""
    import diffusers
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    normal = {} if channels == CHANNELS else dict(latents_mean=[0.1] * channels, latents_std=[2.0] * channels)
    vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                     temperal_downsample=[False, True, True], **normal)
    config = UMT5Config(vocab_size=16, d_model=WIDTH, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
                        feed_forward_proj="gated-gelu")
    parts = dict(vae=vae, text_encoder=UMT5EncoderModel(config).eval(), tokenizer=make_tokenizer(), transformer=None,
                 scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    pipeline = getattr(diffusers, kind)(**parts, **more)
    pipeline.save_pretrained(folder)
    return pipeline


def write_video(folder, frames, rows, columns, colour):
    """Pictures of a square that moves to the right."""
    folder.mkdir(parents=True)
    for frame in range(frames):
        pixels = numpy.full((rows, columns, 3), 30, numpy.uint8)
        left = 2 * frame % (columns - 8)
        pixels[4:12, left:left + 8] = colour
        Image.fromarray(pixels).save(folder / f"{frame:03}.png")
