"""Load an exported run with plain transformers, no shoal in sight, and let it write.

usage: python examples/write_with_transformers.py FOLDER "TEXT TO GO ON WITH"
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    written = model.generate(**inputs, max_new_tokens=160, do_sample=True, temperature=0.7)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
