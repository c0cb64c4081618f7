#!/usr/bin/env python3
"""Complete a prompt with a Hugging Face model folder, greedily, by transformers.

usage: complete.py MODEL_FOLDER PROMPT [--new-tokens 32]
"""
import argparse
import os

os.environ["HF_HUB_OFFLINE"] = "1"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokens = tokenizer(args.prompt, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        output = model.generate(**tokens, max_new_tokens=args.new_tokens, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


main()
