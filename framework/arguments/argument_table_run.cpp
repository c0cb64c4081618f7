#include "framework/arguments/argument_table.h"

namespace megashard::detail {

namespace {

using A = Arguments;

void add_distributed(std::vector<Option>& rows) {
  OptionGroup group("distributed", rows);
  group.add("--use-torch-fsdp2", &A::use_torch_fsdp2, "shard parameters, gradients and optimizer state");
  group.add("--fsdp2-config-path", &A::fsdp2_config_path, "the FSDP2 file; see fsdp2_config.yaml").of_kind("FILE");
  group.add("--fsdp2-config-strict", &A::fsdp2_config_strict,
            "an unknown key, or a pattern without a match, in the FSDP2 file is an error");
  group
      .add("--fsdp-schedule-trace", &A::fsdp_schedule_trace,
           "folder for rank_N.json: when the first steps gathered and reduced, for "
           "chrome://tracing")
      .of_kind("DIR");
  group
      .add("--no-reduce-scatter-during-grad-accumulation", &A::reduce_scatter_during_grad_accumulation,
           "gradients stay whole until the last microbatch: less communication, more memory")
      .turns_off()
      .named("reduce_scatter_during_grad_accumulation");
  group
      .add("--freeze-module-prefix", &A::freeze_module_prefix,
           "parameters whose names begin so are not trained: model.embed_tokens model.layers.0.")
      .of_kind("NAME");
  group
      .add("--device", &A::device,
           "auto: cuda when there is a GPU; sim: a CUDA device made of the CPU, which finds races")
      .one_of({"auto", "cpu", "cuda", "sim"});
  group.add("--log-host-syncs", &A::log_host_syncs, "after each step, what made the host wait for the device");
  group.add("--distributed-backend", &A::distributed_backend, "nccl, gloo, or cpu:gloo,cuda:nccl; unset: by the device")
      .of_kind("NAME");
  group.add("--distributed-timeout-minutes", &A::distributed_timeout_minutes, "deadline of every collective");
  group
      .add("--distributed-init-method", &A::distributed_init_method,
           "tcp://HOST:PORT or file://PATH; unset: env:// (MASTER_ADDR, MASTER_PORT)")
      .of_kind("URL");
  group.add("--local-rank", &A::local_rank, "rank on this machine, and its GPU, where the launcher does not say it");
  group.add("--tensor-model-parallel-size", &A::tensor_model_parallel_size, "")
      .refuse("tensor parallelism is not in this version, which shards over all ranks by FSDP2; leave "
              "it out")
      .except("1");
  group.add("--pipeline-model-parallel-size", &A::pipeline_model_parallel_size, "")
      .refuse("pipeline parallelism is not part of this program, which shards over all ranks by FSDP2; "
              "leave it out")
      .except("1");
  group.add("--context-parallel-size", &A::context_parallel_size, "ranks that share each sequence");
  group.add("--context-parallel-algo", &A::context_parallel_algo, "how: by all-to-all exchanges around attention")
      .one_of({"ulysses_cp_algo"})
      .refuse_values(
          {"megatron_cp_algo", "hybrid_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo", "kvallgather_cp_algo"},
          "ring attention is not in this version; ulysses_cp_algo is, which shares out "
          "attention heads");
  group.add("--expert-model-parallel-size", &A::expert_model_parallel_size, "ranks that share the experts");
  group.add("--sequence-parallel", &A::sequence_parallel, "")
      .in_vain("it needs tensor parallelism; --context-parallel-size shares sequences");
  group.add("--no-gradient-accumulation-fusion", &A::gradient_accumulation_fusion, "")
      .turns_off()
      .named("gradient_accumulation_fusion")
      .in_vain("gradients are never accumulated by a fused kernel here");
  group.computed("world_size", &A::world_size);
  group.computed("rank", &A::rank);
  group.computed("data_parallel_size", &A::data_parallel_size);
}

void add_checkpoint(std::vector<Option>& rows) {
  OptionGroup group("checkpointing", rows);
  group.add("--save", &A::save, "folder for checkpoints").of_kind("DIR");
  group.add("--save-interval", &A::save_interval, "steps between checkpoints").alias("--persistent-save-interval");
  group
      .add("--async-save", &A::async_save,
           "training waits only until its state is copied to host memory; a thread writes it")
      .alias("--async-save-ckpt");
  group.add("--most-recent-k", &A::most_recent_k, "keep the newest so many checkpoints of --save; unset: all")
      .alias("--keep-last-checkpoints");
  group.add("--save-retain-interval", &A::save_retain_interval,
            "keep the multiples of it too; without --most-recent-k these and the newest");
  group.add("--overwrite-run", &A::overwrite_run,
            "--save may hold steps of another run: they are removed when this run's first step is "
            "complete");
  group.add("--load", &A::load, "folder with checkpoints, or one step's; beats the weights of --hf-model")
      .of_kind("DIR");
  group.add("--no-save-optim", &A::no_save_optim, "leave the optimizer out");
  group.add("--no-save-rng", &A::no_save_rng, "leave random states out");
  group.add("--no-load-optim", &A::no_load_optim, "start with a fresh optimizer");
  group.add("--no-load-rng", &A::no_load_rng, "start with fresh random states");
  group.add("--finetune", &A::finetune, "load weights only and start at iteration 0");
  group
      .add("--pretrained-checkpoint", &A::pretrained_checkpoint,
           "loaded as with --finetune when --load has no checkpoint")
      .of_kind("DIR");
  group.add("--ckpt-step", &A::ckpt_step, "load this iteration instead of the latest");
  group
      .add("--no-verify-checkpoint", &A::verify_checkpoint,
           "compare only lengths before loading a checkpoint, and not the checksums of all its "
           "bytes")
      .turns_off()
      .named("verify_checkpoint");
  group.add("--use-checkpoint-args", &A::use_checkpoint_args,
            "network, dropouts, sequence length and tokenizer of the checkpoint, where not given");
  group
      .add("--dist-ckpt-strictness", &A::dist_ckpt_strictness,
           "names that only the checkpoint or only the run has; unset: raise_all")
      .one_of({"assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
               "return_unexpected", "return_all", "ignore_all"});
  group.add("--exit-on-missing-checkpoint", &A::exit_on_missing_checkpoint, "an error when --load has no checkpoint");
  group.add("--auto-detect-ckpt-format", &A::auto_detect_ckpt_format,
            "load a checkpoint of either format; without it, of --ckpt-format only");
  const auto refuse_formats = [](Option& option) {
    option
        .refuse_values({"zarr"}, "it is not part of this program, and Megatron gave it up; use torch_dist or "
                                 "torch_dcp")
        .refuse_values({"torch"}, "it keeps whole tensors, which FSDP2 does not have; use torch_dist or "
                                  "torch_dcp")
        .refuse_values({"fsdp_dtensor"}, "it belongs to Megatron's own FSDP; use torch_dist or torch_dcp");
  };
  refuse_formats(group.add("--ckpt-format", &A::ckpt_format, "format of checkpoints, saved and loaded")
                     .one_of({"torch_dist", "torch_dcp"}));
  refuse_formats(group
                     .add("--ckpt-convert-format", &A::ckpt_convert_format,
                          "save the checkpoint of --load again in this format, and exit")
                     .one_of({"torch_dist", "torch_dcp"}));
  group.add("--ckpt-convert-save", &A::ckpt_convert_save, "with it: written to DIR/torch_dist or DIR/torch_dcp")
      .of_kind("DIR");
  group
      .add("--save-hf", &A::save_hf,
           "folder for the weights as Hugging Face files, which all ranks write when training "
           "ends")
      .of_kind("DIR");
  group.add("--overwrite", &A::overwrite,
            "with it: the folder may hold weights, which are replaced when the new ones are "
            "complete, or a run's steps, which stay");
  group.add("--save-hf-stacked-experts", &A::save_hf_stacked_experts,
            "with it: the experts of a layer in gate_up_proj and down_proj, as transformers has "
            "them in memory");
}

void add_data(std::vector<Option>& rows) {
  OptionGroup group("data", rows);
  constexpr const char* kBlend = "[WEIGHT] PREFIX";
  group.add("--data-path", &A::data_path, "of .bin/.idx files, split by --split").of_kind(kBlend);
  group.add("--split", &A::split, "parts of training, validation and test: 969,30,1").of_kind("N,N,N");
  group.add("--train-data-path", &A::train_data_path, "training data, instead of --data-path").of_kind(kBlend);
  group.add("--valid-data-path", &A::valid_data_path, "validation data").of_kind(kBlend);
  group.add("--test-data-path", &A::test_data_path, "test data").of_kind(kBlend);
  group.add("--data-args-path", &A::data_args_path, "a file with the words of --data-path").of_kind("FILE");
  group.add("--data-cache-path", &A::data_cache_path, "")
      .in_vain("sample indices are built in memory at every start, so there is no cache");
  group.add("--no-mmap-bin-files", &A::mmap_bin_files, "")
      .turns_off()
      .named("mmap_bin_files")
      .in_vain("the .bin files are always mapped");
  group.add("--mock-data", &A::mock_data, "generated tokens, for trials");
  group.add("--seq-length", &A::seq_length, "tokens of a sequence");
  group.add("--encoder-seq-length", &A::encoder_seq_length, "another name for --seq-length");
  group.add("--dataloader-type", &A::dataloader_type, "single: in order; cyclic: shuffled each epoch")
      .one_of({"single", "cyclic"})
      .refuse_values({"external"}, "it takes a loader written in Python; use single or cyclic");
  group.add("--num-workers", &A::num_workers, "batches that are prepared ahead, by one thread; at least one");
  group.add("--reset-position-ids", &A::reset_position_ids, "positions start anew after an end of document");
  group.add("--reset-attention-mask", &A::reset_attention_mask, "attention does not cross an end of document");
  group.add("--eod-mask-loss", &A::eod_mask_loss, "no loss on ends of documents");
}

void add_tokenizer(std::vector<Option>& rows) {
  OptionGroup group("tokenizer", rows);
  group
      .add("--tokenizer-type", &A::tokenizer_type,
           "training reads tokens, so it only tells the end of a document: NullTokenizer: token "
           "number --vocab-size; HuggingFaceTokenizer: the eos_token of --tokenizer-model")
      .one_of({"NullTokenizer", "HuggingFaceTokenizer"})
      .refuse_values({"BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
                      "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "MultimodalTokenizer",
                      "NullMultimodalTokenizer", "SFTTokenizer"},
                     "training reads tokens and loads no tokenizer; leave it out, or give "
                     "HuggingFaceTokenizer, or NullTokenizer with --vocab-size");
  group.add("--tokenizer-model", &A::tokenizer_model, "folder of the Hugging Face tokenizer")
      .of_kind("DIR")
      .alias("--tokenizer-name-or-path");
  group.add("--vocab-size", &A::vocab_size,
            "tokens, needed without --hf-model; NullTokenizer adds one for the end of a document");
  group.add("--vocab-extra-ids", &A::vocab_extra_ids, "further tokens");
  group.add("--padded-vocab-size", &A::padded_vocab_size,
            "tokens with padding; unset: by --make-vocab-size-divisible-by");
  group.without_effect("--vocab-file", 1, "training reads tokens; a vocabulary file is for preprocessing");
  group.without_effect("--merge-file", 1, "training reads tokens; a merge file is for preprocessing");
}

}  // namespace

void add_run_options(std::vector<Option>& rows) {
  add_distributed(rows);
  add_checkpoint(rows);
  add_data(rows);
  add_tokenizer(rows);
}

}  // namespace megashard::detail
