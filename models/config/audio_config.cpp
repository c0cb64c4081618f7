#include "models/config/audio_config.h"
#include "models/config/read_decoder_config.h"

namespace megashard {

int64_t AudioConfig::features_of(int64_t frames) {
  for (int i = 0; i < 3; ++i) frames = (frames + 1) / 2;
  return frames;
}

AudioConfig read_audio_config(const HfConfig& model, AudioConfig audio, int64_t hidden_size) {
  const auto config = model.object("audio_config");
  TORCH_CHECK(config, model.path(), ": a model that hears needs an audio_config");
  for (const char* key : {"dropout", "attention_dropout", "activation_dropout"}) {
    config->require_computed(config->get(key, 0.0) == 0, std::string(key) + " of audio_config must be 0");
  }
  config->require_computed(!config->get("scale_embedding", false), "scale_embedding of audio_config must be false");
  audio.depth = read_positive(*config, "encoder_layers", audio.depth);
  audio.hidden_size = read_positive(*config, "d_model", audio.hidden_size);
  audio.intermediate_size = read_positive(*config, "encoder_ffn_dim", audio.intermediate_size);
  audio.num_heads = read_positive(*config, "encoder_attention_heads", audio.num_heads);
  audio.mel_bins = read_positive(*config, "num_mel_bins", 128);
  audio.conv_channels = read_positive(*config, "downsample_hidden_size", 480);
  audio.chunk = 2 * read_positive(*config, "n_window", 50);
  audio.window = read_positive(*config, "n_window_infer", 800) / audio.chunk;
  audio.convolved = read_positive(*config, "conv_chunksize", 500);
  audio.out_size = read_positive(*config, "output_dim", 3584);
  audio.activation = read_activation(*config, "activation_function", "gelu");
  audio.token_id = model.get("audio_token_id", audio.token_id);
  TORCH_CHECK(audio.hidden_size % audio.num_heads == 0 && audio.hidden_size % 2 == 0, config->path(), ": d_model ",
              audio.hidden_size, " of audio_config must be even and a multiple of encoder_attention_heads ",
              audio.num_heads);
  constexpr int64_t kFeaturesOfChunk = 13;  // transformers counts as many whatever the chunk
  config->require_computed(AudioConfig::features_of(audio.chunk) == kFeaturesOfChunk && audio.window > 0,
                           "n_window of audio_config must be 50, whose chunks have 13 features, and n_window_infer a "
                           "multiple of 100");
  TORCH_CHECK(audio.out_size == hidden_size, config->path(), ": output_dim ", audio.out_size,
              " of audio_config must be hidden_size ", hidden_size, " of the text model");
  return audio;
}

}  // namespace megashard
