#include "framework/arguments/argument_table_foreign.h"

namespace megashard::detail {

namespace {

void refuse_experts(ForeignFlags& flags) {
  flags.refuse(
      "experts come with a model of experts by --hf-model, whose config.json describes them; leave "
      "it out",
      {{"--num-experts", 1}, {"--moe-ffn-hidden-size", 1}, {"--moe-router-topk", 1}, {"--moe-layer-freq", 1, "1"}});
  flags.refuse("the load-balancing loss is that of config.json of --hf-model (output_router_logits and "
               "router_aux_loss_coef); leave it out",
               {{"--moe-aux-loss-coeff", kAny, "0.0"}, {"--moe-router-load-balancing-type", kAny, "aux_loss"}});
  flags.refuse("routers take the largest softmax values, in fp32 and without further losses, groups or "
               "biases; leave it out",
               {{"--moe-z-loss-coeff", 1, "0"},
                {"--moe-input-jitter-eps", 1, "0"},
                {"--moe-router-dtype", 1, "fp32"},
                {"--moe-router-score-function", 1, "softmax"},
                {"--moe-router-pre-softmax"},
                {"--moe-router-topk-scaling-factor", 1, "1.0"},
                {"--moe-router-num-groups", 1},
                {"--moe-router-group-topk", 1},
                {"--moe-router-enable-expert-bias"},
                {"--moe-router-force-load-balancing"},
                {"--moe-enable-routing-replay"}});
  flags.refuse("every token reaches all the experts that it chose; leave it out",
               {{"--moe-expert-capacity-factor", 1}});
  flags.refuse("no model family of this program has experts of that kind; leave it out",
               {{"--moe-shared-expert-intermediate-size", 1},
                {"--moe-shared-expert-gate"},
                {"--moe-apply-probs-on-input"},
                {"--moe-latent-size", 1},
                {"--moe-use-upcycling"}});
}

void refuse_attention(ForeignFlags& flags) {
  flags.refuse("attention is causal and over the whole sequence; leave it out",
               {{"--attention-mask-type", 1, "causal"}, {"--window-size", 1}});
  flags.refuse("no model family of this program has attention of that kind; leave it out",
               {{"--softmax-type", 1, "vanilla"},
                {"--qk-l2-norm"},
                {"--qk-clip"},
                {"--attention-output-gate"},
                {"--experimental-attention-variant", 1},
                {"--linear-attention-freq", 1}});
  flags.refuse("all layers have the same positions; leave it out", {{"--no-rope-freq", 1}});
  flags.refuse("positions are scaled by --use-rope-scaling with --rope-scaling-factor (Llama 3) or by "
               "--rotary-seq-len-interpolation-factor",
               {{"--rope-type", 1, "rope"}, {"--rotary-scaling-factor", 1, "1.0"}});
  flags.refuse("M-RoPE's sections come from the config.json of --hf-model", {{"--mrope-section", kAny}});
}

void refuse_layers(ForeignFlags& flags) {
  flags.refuse("the MLP is GELU, --openai-gelu, --squared-relu or --swiglu; use one of these",
               {{"--quick-geglu"}, {"--glu-linear-offset", 1, "0.0"}, {"--activation-func-clamp-value", 1}});
  flags.refuse("the embedding is drawn as the other weights, by --init-method-std",
               {{"--embedding-init-method-std", 1}});
  flags.refuse("all layers of a network are alike, and none is Mamba's; leave it out",
               {{"--is-hybrid-model"},
                {"--hybrid-attention-ratio", 1, "0.0"},
                {"--hybrid-mlp-ratio", 1, "0.0"},
                {"--hybrid-override-pattern", 1},
                {"--heterogeneous-layers-config-path", 1},
                {"--heterogeneous-layers-config-encoded-json", 1}});
  flags.refuse("networks here have no encoder beside the decoder; use --num-layers", {{"--decoder-num-layers", 1}});
  flags.refuse("networks here have no encoder beside the decoder; use --seq-length", {{"--decoder-seq-length", 1}});
  flags.refuse("vision towers come with a vision-language model by --hf-model; leave it out",
               {{"--vision-pretraining"}});
}

void refuse_adapters(ForeignFlags& flags) {
  flags.refuse("adapters stand on linear layers; choose them by --lora-target-modules",
               {{"--lora-target-parameters", kAny}, {"--lora-apply-modules", kAny, "all"}});
  flags.refuse("adapters alone are trained; leave it out", {{"--lora-mixed-training", 1, "False"}});
}

}  // namespace

void refuse_flags_of_networks(ForeignFlags& flags) {
  refuse_experts(flags);
  refuse_attention(flags);
  refuse_layers(flags);
  refuse_adapters(flags);
}

}  // namespace megashard::detail
