"""Text from an export, by plain transformers; nothing of shardwise is imported.

python examples/generate.py FOLDER "ROMEO." [--chat] [--tokens 60]
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn")
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder)
    prompt = (
        tokenizer.apply_chat_template([{"role": "user", "content": args.prompt}], tokenize=False, add_generation_prompt=True)
        if args.chat
        else args.prompt
    )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not args.chat)
    length = inputs.input_ids.shape[1]
    out = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=args.tokens,
        do_sample=not args.chat,
        **({} if args.chat else {"temperature": 0.8, "top_k": 40}),
        pad_token_id=tokenizer.eos_token_id,
    )
    print(tokenizer.decode(out[0, length if args.chat else 0 :], skip_special_tokens=True).strip())


if __name__ == "__main__":
    main()
