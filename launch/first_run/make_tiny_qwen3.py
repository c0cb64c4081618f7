#!/usr/bin/env python3
"""Write a folder with the config.json of a small Qwen3 and a tokenizer trained on a text; no weights.

usage: make_tiny_qwen3.py TEXT OUTPUT_FOLDER [--vocab-size 2048]
"""
import argparse
import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(args.text)], trainer)

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": args.vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": config["max_position_embeddings"],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.output / "tokenizer.json"))
    (args.output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.output / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    print(f"wrote a Qwen3 configuration and a tokenizer of {tokenizer.get_vocab_size()} tokens to {args.output}")


main()
