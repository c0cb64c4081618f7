#include "models/diffusion/hunyuan_config.h"

#include <c10/util/Exception.h>

#include <array>
#include <string>
#include <utility>

#include "models/diffusion/latent_families.h"

namespace megashard {
namespace {

void require_computable(const HfConfig& config, const HunyuanVideoConfig& video) {
  TORCH_CHECK(video.in_channels >= video.out_channels, config.path(), ": in_channels must not be less than ",
              "out_channels");
  require_axes(config, video.axes, video.sizes.head_dim);
}

/// Names of a block's layers here and in HunyuanVideo's own code.
constexpr std::array<std::pair<const char*, const char*>, 18> kBlockNames{{{"norm1.linear.", "img_mod.linear."},
                                                                           {"attn.to_q.", "img_attn_q."},
                                                                           {"attn.to_k.", "img_attn_k."},
                                                                           {"attn.to_v.", "img_attn_v."},
                                                                           {"attn.norm_q.", "img_attn_q_norm."},
                                                                           {"attn.norm_k.", "img_attn_k_norm."},
                                                                           {"attn.to_out.0.", "img_attn_proj."},
                                                                           {"ff.net.0.proj.", "img_mlp.fc1."},
                                                                           {"ff.net.2.", "img_mlp.fc2."},
                                                                           {"norm1_context.linear.", "txt_mod.linear."},
                                                                           {"attn.add_q_proj.", "txt_attn_q."},
                                                                           {"attn.add_k_proj.", "txt_attn_k."},
                                                                           {"attn.add_v_proj.", "txt_attn_v."},
                                                                           {"attn.norm_added_q.", "txt_attn_q_norm."},
                                                                           {"attn.norm_added_k.", "txt_attn_k_norm."},
                                                                           {"attn.to_add_out.", "txt_attn_proj."},
                                                                           {"ff_context.net.0.proj.", "txt_mlp.fc1."},
                                                                           {"ff_context.net.2.", "txt_mlp.fc2."}}};
constexpr std::array<std::pair<const char*, const char*>, 6> kRefinerNames{
    {{"norm1.", "norm1."},
     {"norm2.", "norm2."},
     {"attn.to_out.0.", "self_attn_proj."},
     {"ff.net.0.proj.", "mlp.fc1."},
     {"ff.net.2.", "mlp.fc2."},
     {"norm_out.linear.", "adaLN_modulation.1."}}};
constexpr const char* kRefiner = "context_embedder.token_refiner.refiner_blocks.";
constexpr const char* kOriginalRefiner = "txt_in.individual_token_refiner.blocks.";

std::vector<WeightRenaming> original_names(const HunyuanVideoConfig& config) {
  std::vector<WeightRenaming> names{
      {"x_embedder.proj.", "img_in.proj."},
      {"image_embedder.norm_in.", "vision_in.proj.0."},
      {"image_embedder.linear_1.", "vision_in.proj.1."},
      {"image_embedder.linear_2.", "vision_in.proj.3."},
      {"image_embedder.norm_out.", "vision_in.proj.4."},
      {"context_embedder.time_text_embed.timestep_embedder.linear_1.", "txt_in.t_embedder.mlp.0."},
      {"context_embedder.time_text_embed.timestep_embedder.linear_2.", "txt_in.t_embedder.mlp.2."},
      {"context_embedder.time_text_embed.text_embedder.", "txt_in.c_embedder."},
      {"context_embedder.proj_in.", "txt_in.input_embedder."},
      {"context_embedder_2.norm.", "byt5_in.layernorm."},
      {"context_embedder_2.linear_1.", "byt5_in.fc1."},
      {"context_embedder_2.linear_2.", "byt5_in.fc2."},
      {"context_embedder_2.linear_3.", "byt5_in.fc3."},
      {"time_embed.timestep_embedder.linear_1.", "time_in.mlp.0."},
      {"time_embed.timestep_embedder.linear_2.", "time_in.mlp.2."},
      {"cond_type_embed.", "cond_type_embedding."},
      {"proj_out.", "final_layer.linear."}};
  const auto add_blocks = [&](const auto& layers, int64_t count, const std::string& ours, const std::string& theirs) {
    for (int64_t i = 0; i < count; ++i) {
      for (const auto& [name, original] : layers) {
        const auto number = std::to_string(i) + ".";
        names.push_back({ours + number + name, theirs + number + original});
      }
    }
  };
  add_blocks(kRefinerNames, config.num_refiner_layers, kRefiner, kOriginalRefiner);
  add_blocks(kBlockNames, config.num_layers, "transformer_blocks.", "double_blocks.");
  return names;
}

/// A group of tensors of `width` rows each, which follow each other in the stored one in the order of `places`.
WeightGroup stacked_rows(const std::vector<std::string>& tensors, const std::string& stored,
                         std::vector<int64_t> sizes) {
  WeightGroup group{.tensors = {}, .forms = {{.kind = "fused", .parts = {}}}};
  auto all = sizes;
  all[0] *= static_cast<int64_t>(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    group.tensors.push_back({tensors[i], sizes});
    group.forms[0].parts.push_back(rows_part(tensors[i], 0, sizes[0], stored, all, static_cast<int64_t>(i) * sizes[0]));
  }
  return group;
}

}  // namespace

HunyuanVideoConfig hunyuan_video_config(const HfConfig& config) {
  require_known_keys(config, {"in_channels", "out_channels", "num_attention_heads", "attention_head_dim", "num_layers",
                              "num_refiner_layers", "mlp_ratio", "patch_size", "patch_size_t", "qk_norm",
                              "text_embed_dim", "text_embed_2_dim", "image_embed_dim", "rope_theta", "rope_axes_dim",
                              "target_size", "task_type", "use_meanflow"});
  HunyuanVideoConfig video;
  video.in_channels = config.get("in_channels", video.in_channels);
  video.out_channels = config.get_or_null("out_channels", video.in_channels);
  video.num_layers = config.get("num_layers", video.num_layers);
  video.num_refiner_layers = config.get("num_refiner_layers", video.num_refiner_layers);
  video.sizes = {.num_heads = config.get("num_attention_heads", video.sizes.num_heads),
                 .head_dim = config.get("attention_head_dim", video.sizes.head_dim)};
  video.patch = config.get("patch_size", video.patch);
  video.patch_frames = config.get("patch_size_t", video.patch_frames);
  video.text_dim = config.get("text_embed_dim", video.text_dim);
  video.glyph_dim = config.get("text_embed_2_dim", video.glyph_dim);
  video.image_dim = config.get("image_embed_dim", video.image_dim);
  video.theta = config.get("rope_theta", video.theta);
  video.axes = config.get("rope_axes_dim", video.axes);
  const auto ratio = config.get("mlp_ratio", 4.0);
  const auto norm = config.is_null("qk_norm") ? "null" : config.get("qk_norm", std::string("rms_norm"));
  config.require_computed(ratio == 4, "mlp_ratio is ", ratio, "; only 4 is supported");
  config.require_computed(norm == "rms_norm", "qk_norm is ", norm, "; only rms_norm is supported");
  config.require_computed(!config.get("use_meanflow", false),
                          "use_meanflow is true, which is not supported: train the model that makes videos, not the "
                          "one that enlarges them");
  require_computable(config, video);
  return video;
}

HunyuanVideoConfig original_hunyuan_video_config(const HfConfig& config) {
  require_known_keys(config, {"patch_size",
                              "in_channels",
                              "concat_condition",
                              "out_channels",
                              "hidden_size",
                              "heads_num",
                              "mlp_width_ratio",
                              "mlp_act_type",
                              "mm_double_blocks_depth",
                              "mm_single_blocks_depth",
                              "rope_dim_list",
                              "qkv_bias",
                              "qk_norm",
                              "qk_norm_type",
                              "guidance_embed",
                              "use_meanflow",
                              "text_projection",
                              "use_attention_mask",
                              "text_states_dim",
                              "text_states_dim_2",
                              "text_pool_type",
                              "rope_theta",
                              "attn_mode",
                              "attn_param",
                              "glyph_byT5_v2",
                              "vision_projection",
                              "vision_states_dim",
                              "is_reshape_temporal_channels",
                              "use_cond_type_embedding",
                              "ideal_resolution",
                              "ideal_task"});
  const auto is = [&](const char* key, const auto& wanted) {
    config.require_computed(config.need<std::decay_t<decltype(wanted)>>(key) == wanted, key,
                            " is not that of the published models, which alone are supported");
  };
  for (const char* key : {"concat_condition", "qkv_bias", "qk_norm", "glyph_byT5_v2", "use_cond_type_embedding"})
    is(key, true);
  for (const char* key : {"guidance_embed", "use_meanflow", "is_reshape_temporal_channels"}) is(key, false);
  is("mm_single_blocks_depth", int64_t{0});
  is("mlp_width_ratio", 4.0);
  is("mlp_act_type", std::string("gelu_tanh"));
  is("qk_norm_type", std::string("rms"));
  is("text_projection", std::string("single_refiner"));
  is("vision_projection", std::string("linear"));
  HunyuanVideoConfig video{.has_original_files = true};
  const auto width = config.need<int64_t>("hidden_size");
  video.sizes.num_heads = config.need<int64_t>("heads_num");
  TORCH_CHECK(video.sizes.num_heads > 0 && width % video.sizes.num_heads == 0, config.path(), ": heads_num ",
              video.sizes.num_heads, " does not divide hidden_size ", width);
  video.sizes.head_dim = width / video.sizes.num_heads;
  const auto patch = config.get("patch_size", std::vector<int64_t>{1, 1, 1});
  TORCH_CHECK(patch.size() == 3 && patch[1] == patch[2], config.path(), ": patch_size must be three numbers, of which ",
              "the last two are equal");
  video.patch_frames = patch[0];
  video.patch = patch[1];
  video.in_channels = 2 * config.need<int64_t>("in_channels") + 1;
  video.out_channels = config.need<int64_t>("out_channels");
  video.num_layers = config.need<int64_t>("mm_double_blocks_depth");
  video.text_dim = config.get("text_states_dim", video.text_dim);
  video.image_dim = config.get("vision_states_dim", video.image_dim);
  video.theta = config.get("rope_theta", video.theta);
  video.axes = config.get("rope_dim_list", video.axes);
  require_computable(config, video);
  return video;
}

void add_original_hunyuan_forms(const HunyuanVideoConfig& config, WeightMap& map) {
  const auto names = original_names(config);
  map.renamings.insert(map.renamings.end(), names.begin(), names.end());
  const int64_t width = config.sizes.width();
  for (const std::string& kind : {std::string("weight"), std::string("bias")}) {
    const std::vector<int64_t> sizes =
        kind == "weight" ? std::vector<int64_t>{width, width} : std::vector<int64_t>{width};
    for (int64_t i = 0; i < config.num_refiner_layers; ++i) {
      const auto block = kRefiner + std::to_string(i) + ".attn.to_";
      map.groups.push_back(stacked_rows({block + "q." + kind, block + "k." + kind, block + "v." + kind},
                                        kOriginalRefiner + std::to_string(i) + ".self_attn_qkv." + kind, sizes));
    }
    // Scale and shift of the output have changed places.
    const auto output = "norm_out.linear." + kind, stored = "final_layer.adaLN_modulation.1." + kind;
    auto both = sizes;
    both[0] = 2 * width;
    map.groups.push_back({.tensors = {{output, both}},
                          .forms = {{.kind = "swapped",
                                     .parts = {rows_part(output, 0, width, stored, both, width),
                                               rows_part(output, width, width, stored, both, 0)}}}});
  }
}

}  // namespace megashard
