"""A small LTX-2 with random weights and its connectors, and features as its trainer writes them."""
import torch

TEXT, CHANNELS, SOUND_CHANNELS, BINS = 24, 4, 2, 3  # widths of text features and of latents
SIZES = dict(in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=2, attention_head_dim=24,
             cross_attention_dim=48, audio_in_channels=SOUND_CHANNELS * BINS, audio_out_channels=SOUND_CHANNELS * BINS,
             audio_num_attention_heads=2, audio_attention_head_dim=12, audio_cross_attention_dim=24, num_layers=2,
             caption_channels=TEXT, rope_type="split")


def make_ltx2(folder):
    """The parts of a pipeline that training takes."""
    from diffusers import LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    torch.manual_seed(0)
    heads = dict(video_connector_num_attention_heads=2, video_connector_attention_head_dim=12,
                 video_connector_num_layers=1, video_connector_num_learnable_registers=4,
                 audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=12,
                 audio_connector_num_layers=1, audio_connector_num_learnable_registers=4)
    connectors = LTX2TextConnectors(caption_channels=TEXT, text_proj_in_factor=1, rope_type="split", **heads)
    connectors.save_pretrained(folder / "connectors")
    LTX2VideoTransformer3DModel(**SIZES).save_pretrained(folder / "transformer")
    return connectors.eval()


def write_precomputed(folder, samples=4, frames=2, rows=4, columns=6, tokens=8):
    draw = torch.Generator().manual_seed(0)
    numbers = lambda *sizes: torch.randn(*sizes, generator=draw)
    for name in ("latents", "conditions", "audio_latents"):
        (folder / name).mkdir(parents=True)
    for number in range(samples):
        video = numbers(CHANNELS, frames, rows, columns)
        stored = video if number else video.permute(1, 2, 3, 0).flatten(0, 2)  # both of its forms
        torch.save({"latents": stored, "num_frames": frames, "height": rows, "width": columns,
                    "fps": torch.tensor(25.0)}, folder / "latents" / f"{number:03}.pt")
        torch.save({"prompt_embeds": numbers(tokens, TEXT),
                    "prompt_attention_mask": torch.arange(tokens) >= number}, folder / "conditions" / f"{number:03}.pt")
        torch.save({"latents": numbers(SOUND_CHANNELS, 5, BINS)}, folder / "audio_latents" / f"{number:03}.pt")
    return folder
