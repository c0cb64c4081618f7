#include "models/diffusion/wan_config.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/hugging_face/hf_weights.h"
#include "models/diffusion/latent_families.h"

namespace megashard {
namespace {

constexpr int64_t kOriginalImageDim = 1280;
// VACE's 14B.
const std::vector<int64_t> kControlLayers{0, 5, 10, 15, 20, 25, 30, 35};
constexpr int64_t kControlChannels = 96;

std::array<int64_t, 3> patch_of(const HfConfig& config, std::array<int64_t, 3> patch) {
  const auto given = config.get("patch_size", std::vector<int64_t>(patch.begin(), patch.end()));
  TORCH_CHECK(given.size() == 3, config.path(), ": patch_size has ", given.size(), " numbers, not 3");
  std::ranges::copy(given, patch.begin());
  return patch;
}

void require_computable(const HfConfig& config, const WanConfig& wan) {
  TORCH_CHECK(wan.time_channels % 2 == 0 && wan.head_dim % 2 == 0, config.path(), ": freq_dim ", wan.time_channels,
              " and the channels of a head, ", wan.head_dim, ", must be even");
  TORCH_CHECK(wan.in_channels >= wan.out_channels, config.path(), ": the channels of the input, ", wan.in_channels,
              ", are fewer than those of the output, ", wan.out_channels);
  const auto& layers = wan.control_layers;
  TORCH_CHECK(layers.empty() || (layers.front() == 0 && layers.back() < wan.num_layers &&
                                 std::ranges::is_sorted(layers, std::ranges::less_equal{})),
              config.path(), ": vace_layers must begin with 0, rise, and be fewer than num_layers ", wan.num_layers);
}

}  // namespace

WanConfig wan_config(const HfConfig& config) {
  static const std::set<std::string> known{"patch_size",
                                           "num_attention_heads",
                                           "attention_head_dim",
                                           "in_channels",
                                           "out_channels",
                                           "text_dim",
                                           "freq_dim",
                                           "ffn_dim",
                                           "num_layers",
                                           "cross_attn_norm",
                                           "qk_norm",
                                           "eps",
                                           "image_dim",
                                           "added_kv_proj_dim",
                                           "rope_max_seq_len",
                                           "pos_embed_seq_len",
                                           "vace_layers",
                                           "vace_in_channels"};
  require_known_keys(config, known);
  WanConfig wan;
  wan.patch = patch_of(config, wan.patch);
  wan.num_heads = config.get("num_attention_heads", wan.num_heads);
  wan.head_dim = config.get("attention_head_dim", wan.head_dim);
  wan.in_channels = config.get("in_channels", wan.in_channels);
  wan.out_channels = config.get_or_null("out_channels", wan.in_channels);
  wan.text_dim = config.get("text_dim", wan.text_dim);
  wan.time_channels = config.get("freq_dim", wan.time_channels);
  wan.ffn_dim = config.get("ffn_dim", wan.ffn_dim);
  wan.num_layers = config.get("num_layers", wan.num_layers);
  wan.cross_attn_norm = config.get("cross_attn_norm", wan.cross_attn_norm);
  wan.eps = config.get("eps", wan.eps);
  wan.image_dim = config.get_or_null("image_dim", int64_t{0});
  wan.image_positions = config.get_or_null("pos_embed_seq_len", int64_t{0});
  const auto added = config.get_or_null("added_kv_proj_dim", int64_t{0});
  const std::string norm_of_all = "rms_norm_across_heads";
  const auto norm = config.is_null("qk_norm") ? "null" : config.get("qk_norm", norm_of_all);
  config.require_computed(norm == norm_of_all, "qk_norm is ", norm, "; only ", norm_of_all, " is supported");
  TORCH_CHECK(added == (wan.image_dim > 0 ? wan.width() : 0), config.path(), ": added_kv_proj_dim is ", added,
              ", but must be the model's width ", wan.width(), " with image_dim, and null without it");
  if (config.need<std::string>("_class_name") == "WanVACETransformer3DModel") {
    wan.control_layers = config.get("vace_layers", kControlLayers);
    wan.control_channels = config.get("vace_in_channels", kControlChannels);
  }
  require_computable(config, wan);
  return wan;
}

WanConfig original_wan_config(const HfConfig& config) {
  static const std::set<std::string> known{"model_type",  "dim",        "num_heads",   "num_layers", "in_dim",
                                           "out_dim",     "text_dim",   "freq_dim",    "ffn_dim",    "eps",
                                           "patch_size",  "text_len",   "window_size", "qk_norm",    "cross_attn_norm",
                                           "vace_layers", "vace_in_dim"};
  require_known_keys(config, known);
  const auto task = config.need<std::string>("model_type");
  const bool is_known = task == "t2v" || task == "i2v" || task == "ti2v" || task == "flf2v" || task == "vace";
  config.require_computed(is_known, "model_type is ", task, "; only t2v, i2v, ti2v, flf2v and vace are supported");
  WanConfig wan{.has_original_files = true};
  const auto width = config.need<int64_t>("dim");
  wan.num_heads = config.need<int64_t>("num_heads");
  TORCH_CHECK(wan.num_heads > 0 && width % wan.num_heads == 0, config.path(), ": num_heads ", wan.num_heads,
              " does not divide dim ", width);
  wan.head_dim = width / wan.num_heads;
  wan.num_layers = config.need<int64_t>("num_layers");
  wan.patch = patch_of(config, wan.patch);
  wan.in_channels = config.get("in_dim", wan.in_channels);
  wan.out_channels = config.get("out_dim", wan.out_channels);
  wan.text_dim = config.get("text_dim", wan.text_dim);
  wan.time_channels = config.get("freq_dim", wan.time_channels);
  wan.ffn_dim = config.need<int64_t>("ffn_dim");
  wan.cross_attn_norm = config.get("cross_attn_norm", wan.cross_attn_norm);
  wan.eps = config.get("eps", wan.eps);
  config.require_computed(config.get("qk_norm", true), "qk_norm is false, which is not supported");
  const auto folder = std::filesystem::path(config.path()).parent_path().string();
  const bool takes_image =
      task == "flf2v" ||
      (task == "i2v" && (!has_hf_weights(folder) || open_hf_weights(folder)->find("img_emb.proj.0.weight")));
  if (takes_image) wan.image_dim = kOriginalImageDim;
  if (task == "vace") {
    std::vector<int64_t> layers;  // every second one, if nothing is said
    for (int64_t i = 0; i < wan.num_layers; i += 2) layers.push_back(i);
    wan.control_layers = config.get("vace_layers", layers);
    wan.control_channels = config.get("vace_in_dim", kControlChannels);
  }
  if (task == "flf2v") wan.image_positions = 2 * kWanImageLength;
  require_computable(config, wan);
  return wan;
}

std::vector<WeightRenaming> original_wan_names(const WanConfig& config) {
  std::vector<WeightRenaming> names;
  for (size_t i = 0; i < config.control_layers.size(); ++i) {
    const auto block = "vace_blocks." + std::to_string(i) + ".";
    names.push_back({block + "scale_shift_table", block + "modulation"});
    names.push_back({block + "proj_in.", block + "before_proj."});
    names.push_back({block + "proj_out.", block + "after_proj."});
  }
  names.insert(names.end(), {{"condition_embedder.time_embedder.linear_1.", "time_embedding.0."},
                             {"condition_embedder.time_embedder.linear_2.", "time_embedding.2."},
                             {"condition_embedder.time_proj.", "time_projection.1."},
                             {"condition_embedder.text_embedder.linear_1.", "text_embedding.0."},
                             {"condition_embedder.text_embedder.linear_2.", "text_embedding.2."},
                             {"condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"},
                             {"condition_embedder.image_embedder.norm1.", "img_emb.proj.0."},
                             {"condition_embedder.image_embedder.ff.net.0.proj.", "img_emb.proj.1."},
                             {"condition_embedder.image_embedder.ff.net.2.", "img_emb.proj.3."},
                             {"condition_embedder.image_embedder.norm2.", "img_emb.proj.4."},
                             {"attn2.add_k_proj.", "cross_attn.k_img."},
                             {"attn2.add_v_proj.", "cross_attn.v_img."},
                             {"attn2.norm_added_k.", "cross_attn.norm_k_img."},
                             {"norm2.", "norm3."},
                             {"ffn.net.0.proj.", "ffn.0."},
                             {"ffn.net.2.", "ffn.2."},
                             {"proj_out.", "head.head."}});
  for (const auto& [ours, theirs] : {std::pair("attn1.", "self_attn."), std::pair("attn2.", "cross_attn.")}) {
    for (const auto& [layer, original] :
         {std::pair("to_q.", "q."), std::pair("to_k.", "k."), std::pair("to_v.", "v."), std::pair("to_out.0.", "o."),
          std::pair("norm_q.", "norm_q."), std::pair("norm_k.", "norm_k.")})
      names.push_back({std::string(ours) + layer, std::string(theirs) + original});
  }
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const auto block = "blocks." + std::to_string(i) + ".";
    names.push_back({block + "scale_shift_table", block + "modulation"});
  }
  names.push_back({"scale_shift_table", "head.modulation"});
  return names;
}

}  // namespace megashard
