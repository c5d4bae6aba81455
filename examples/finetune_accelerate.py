"""Fine-tune a causal language model with an Accelerate loop, its attention served by ffpa_hf forward and backward.

    python examples/finetune_accelerate.py                   # offline: a small Gemma 4 on Alice in Wonderland
    accelerate launch examples/finetune_accelerate.py --model NAME --text my.txt --lora --checkpointing --accumulate 4

An ordinary training script: all that is particular to ffpa_hf is the import and attn_implementation="ffpa".
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from small_gemma4 import add_arguments, load, paragraphs, precision
from torch.utils.data import DataLoader

import ffpa_hf


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all weights")
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default=precision())
    return parser.parse_args()


def main() -> None:
    args = parse()
    set_seed(0)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
    )
    model, tokenizer = load(args)
    model.config.use_cache = False
    if args.checkpointing:
        # not the reentrant kind: it loses gradients where layers share keys and values (Gemma 4 E2B, E4B)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))

    tokens = tokenizer("\n\n".join(paragraphs(args)))["input_ids"]
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
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % 10 == 0 or step in (1, args.steps):
                accelerator.print(f"step {step:5d}  loss {loss.item():.4f}")
            if step == args.steps:
                break
    accelerator.print(ffpa_hf.report(accelerator.unwrap_model(model)))
    if args.output and accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output)


if __name__ == "__main__":
    main()
