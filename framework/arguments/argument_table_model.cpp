#include "framework/arguments/argument_table.h"

namespace megashard::detail {

namespace {

using A = Arguments;

void add_source(std::vector<Option>& rows) {
  OptionGroup group("model source", rows);
  group
      .add("--hf-model", &A::hf_model,
           "Hugging Face directory: config.json and weights; a size flag that contradicts it is "
           "an error")
      .of_kind("DIR")
      .alias("--init-from-hf-path");
  group.add("--from-scratch", &A::from_scratch, "with --hf-model: its architecture, fresh weights");
  group.add("--model-plugin", &A::model_plugin, "shared library that registers models of your own").of_kind("FILE");
  group.add("--model", &A::model, "registered model; unset: what --hf-model's config.json names, or the flags' network")
      .of_kind("NAME");
}

void add_network(std::vector<Option>& rows) {
  OptionGroup group("network size", rows);
  group.add("--num-layers", &A::num_layers, "transformer layers");
  group.add("--encoder-num-layers", &A::encoder_num_layers, "another name for --num-layers");
  group.add("--hidden-size", &A::hidden_size, "width of the residual stream");
  group.add("--ffn-hidden-size", &A::ffn_hidden_size,
            "width of the MLP; unset: 4 * hidden size, with --swiglu 8/3 of it in steps of 64");
  group.add("--num-attention-heads", &A::num_attention_heads, "query heads");
  group.add("--kv-channels", &A::kv_channels, "head size; unset: hidden size / heads");
  group.add("--group-query-attention", &A::group_query_attention, "fewer key/value than query heads");
  group.add("--num-query-groups", &A::num_query_groups, "key/value heads with --group-query-attention");
  group.add("--max-position-embeddings", &A::max_position_embeddings, "longest sequence");
  group
      .add("--position-embedding-type", &A::position_embedding_type,
           "how positions are encoded; mrope: only with --hf-model of a vision-language model")
      .one_of({"learned_absolute", "rope", "mrope", "none"})
      .refuse_values({"relative"}, "it belongs to T5; use rope or learned_absolute");
  group.add("--use-rotary-position-embeddings", &A::use_rotary_position_embeddings,
            "same as --position-embedding-type rope");
  group.add("--rotary-base", &A::rotary_base, "base of the rotary frequencies");
  group.add("--rotary-percent", &A::rotary_percent, "part of the head that is rotated");
  group.add("--rotary-interleaved", &A::rotary_interleaved, "")
      .refuse("halves of a head are rotated, as in Hugging Face's models, and not pairs of neighbours; "
              "leave it out");
  group.add("--rotary-seq-len-interpolation-factor", &A::rotary_seq_len_interpolation_factor, "divides the positions");
  group.add("--use-rope-scaling", &A::use_rope_scaling, "Llama 3's scaling of the rotary frequencies");
  group.add("--rope-scaling-factor", &A::rope_scaling_factor, "factor of --use-rope-scaling");
  group.add("--make-vocab-size-divisible-by", &A::make_vocab_size_divisible_by,
            "pads the vocabulary; never with --hf-model");
  group.add("--normalization", &A::normalization, "kind of norm").one_of({"LayerNorm", "RMSNorm"});
  group.add("--norm-epsilon", &A::norm_epsilon, "epsilon of the norms").alias("--layernorm-epsilon");
  group.add("--apply-layernorm-1p", &A::apply_layernorm_1p, "norms multiply by 1 + weight, from weights of zero");
  group.add("--openai-gelu", &A::openai_gelu, "GELU by tanh");
  group.add("--squared-relu", &A::squared_relu, "squared ReLU in the MLP");
  group.add("--swiglu", &A::swiglu, "gated SiLU in the MLP");
  group.add("--apply-tiled-mlp", &A::apply_tiled_mlp,
            "compute each MLP in pieces of the sequence, again in backward (ROLL)");
  group.add("--tiled-num-shards", &A::tiled_num_shards, "how many, with --apply-tiled-mlp");
  group.add("--lora-r", &A::lora_r, "rank of LoRA adapters, which alone are trained and saved");
  group.add("--lora-alpha", &A::lora_alpha, "their sum counts alpha / rank");
  group.add("--lora-dropout", &A::lora_dropout, "on their input");
  group
      .add("--lora-target-modules", &A::lora_target_modules,
           "linear layers that get them, by last name (q_proj v_proj ...); all-linear: all but "
           "the output's")
      .of_kind("NAME");
  group.add("--untie-embeddings-and-output-weights", &A::untie_embeddings_and_output_weights,
            "the output layer has weights of its own");
  group.add("--disable-bias-linear", &A::add_bias_linear, "no biases in linear layers")
      .turns_off()
      .named("add_bias_linear");
  group.add("--add-qkv-bias", &A::add_qkv_bias, "biases in the query/key/value projection");
  group.add("--qk-layernorm", &A::qk_layernorm, "norms on queries and keys");
  group
      .add("--no-position-embedding", &A::add_position_embedding, "no learned positions, which goes with rope and none")
      .turns_off()
      .named("add_position_embedding");
  group.refused("--apply-residual-connection-post-layernorm", 0,
                "it belongs to BERT models, which are not part of this program; leave it out");
  group.refused("--multi-latent-attention", 0,
                "no model family of this program has multi-latent attention; leave it out");
  group.refused("--mtp-num-layers", 1, "no model family of this program has multi-token prediction; leave it out");
}

void add_initialization(std::vector<Option>& rows) {
  OptionGroup group("initialization", rows);
  group.add("--seed", &A::seed, "of weights, dropout and data order");
  group.add("--data-parallel-random-init", &A::data_parallel_random_init,
            "other random numbers on each data parallel rank");
  group.add("--init-method-std", &A::init_method_std, "standard deviation of fresh weights");
  group.add("--init-method-xavier-uniform", &A::init_method_xavier_uniform, "")
      .refuse("fresh weights are drawn from a normal distribution; leave it out and choose its width "
              "by --init-method-std");
  group.add("--no-initialization", &A::perform_initialization, "leave weights unset: they are loaded")
      .turns_off()
      .named("perform_initialization");
  group.add("--use-cpu-initialization", &A::use_cpu_initialization, "")
      .in_vain("fresh weights are always drawn on the CPU");
  group.add("--init-model-with-meta-device", &A::init_model_with_meta_device,
            "build without memory, shard, then fill each rank's part");
}

void add_regularization(std::vector<Option>& rows) {
  OptionGroup group("regularization", rows);
  group.add("--attention-dropout", &A::attention_dropout, "dropout of attention weights");
  group.add("--hidden-dropout", &A::hidden_dropout, "dropout of the residual stream");
}

void add_precision(std::vector<Option>& rows) {
  OptionGroup group("mixed precision", rows);
  group.add("--bf16", &A::bf16,
            "STORE parameters in bf16; to compute in bf16 with fp32 weights set param_dtype: bf16 "
            "in the FSDP2 file instead");
  group.add("--downcast-to-bf16", &A::downcast_to_bf16, "")
      .refuse("weights are loaded as they were saved; to compute in bf16 set param_dtype: bf16 in the "
              "FSDP2 file, to store them in bf16 give --bf16");
  group.computed("params_dtype", &A::params_dtype);
  group.refused("--fp16", 0,
                "fp16 needs loss scaling, which FSDP2 training here does not have; use "
                "param_dtype: bf16 in the "
                "FSDP2 file, or --bf16");
  group.refused("--fp16-lm-cross-entropy", 0, "the loss is computed in fp32; leave it out");
  group.refused("--fp32-residual-connection", 0, "the residual stream has the dtype of the parameters; leave it out");
  group.refused("--grad-reduce-in-bf16", 0,
                "with FSDP2 gradients are reduced in the file's reduce_dtype; set reduce_dtype: bf16 there");
}

}  // namespace

void add_model_options(std::vector<Option>& rows) {
  add_source(rows);
  add_network(rows);
  add_initialization(rows);
  add_regularization(rows);
  add_precision(rows);
}

}  // namespace megashard::detail
