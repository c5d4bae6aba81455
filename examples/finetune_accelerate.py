"""Fine-tune a causal language model with Accelerate, its attention served by ffpa_hf forward and backward.

    accelerate launch --mixed_precision bf16 examples/finetune_accelerate.py --model NAME --text my.txt --lora
    python examples/finetune_accelerate.py --steps 20        # offline: a small Gemma 4 on Alice in Wonderland

An ordinary training script: all that is particular to ffpa_hf is the import and attn_implementation="ffpa".
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import ffpa_hf
from ffpa_hf.demo.finetune import ON_CPU, read_text, write_checkpoint


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a causal language model; none: a small random Gemma 4")
    parser.add_argument("--text", type=Path, help="a text file to train on; none: Alice in Wonderland")
    parser.add_argument("--attn", default="ffpa", help="attn_implementation: ffpa, sdpa or eager")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all weights")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--output", type=Path, help="folder to save the result in")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[Any, list[int]]:
    """The model, and the whole text as token ids; bytes are the tokens of the small model."""
    text = args.text.read_bytes() if args.text else read_text()
    if args.model:
        tokens = AutoTokenizer.from_pretrained(args.model)(text.decode("utf-8"))["input_ids"]
        return AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=args.attn), tokens
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(ON_CPU, Path(folder), seed=0)
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=args.attn), list(text)


def main() -> None:
    args = parse()
    accelerator = Accelerator()  # precision and processes are the business of `accelerate launch`
    model, tokens = load(args)
    model.config.use_cache = False
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    count = len(tokens) // args.length
    if count < args.batch:
        raise SystemExit(f"{len(tokens)} tokens are less than one batch of {args.batch} x {args.length}.")
    sequences: Any = torch.tensor(tokens[: count * args.length]).view(count, args.length)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    loader: Any = DataLoader(sequences, batch_size=args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)

    step = 0
    while step < args.steps:
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0 or step == args.steps:
                accelerator.print(f"step {step:5d}  loss {loss.item():.4f}")
            if step == args.steps:
                break
    accelerator.print(ffpa_hf.report(accelerator.unwrap_model(model)))
    if args.output and accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output)


if __name__ == "__main__":
    main()
