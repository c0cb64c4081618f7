#pragma once

#include "framework/arguments/arguments.h"
#include "tests/framework/data/token_files.h"

namespace megashard::testing {

/// Three steps of two samples of a model that is the test's own.
inline Arguments small_run() {
  Arguments arguments;
  arguments.num_layers = 1;
  arguments.hidden_size = 8;
  arguments.num_attention_heads = 2;
  arguments.seq_length = arguments.max_position_embeddings = 8;
  arguments.micro_batch_size = 1;
  arguments.global_batch_size = 2;
  arguments.train_iters = 3;
  arguments.eval_iters = 0;
  arguments.log_interval = 1;
  arguments.lr = 1e-2;
  arguments.vocab_size = 200;
  arguments.data_path = {write_documents(fresh_prefix("tokens"), {40, 40, 40, 40})};
  arguments.split = "100,0,0";
  return arguments;
}

}  // namespace megashard::testing
