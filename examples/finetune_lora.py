"""LoRA with PEFT, or all weights, on a model of Gemma 4's architecture; then the result is loaded again and writes on.

    python examples/finetune_lora.py                         # a LoRA adapter: trained, saved, loaded, merged
    python examples/finetune_lora.py --full                  # all weights, for comparison
    accelerate launch examples/finetune_lora.py --model NAME --text my.txt --checkpointing

Training and generation both run on attn_implementation="ffpa".
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from small_gemma4 import add_arguments, load, paragraphs, precision
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

import ffpa_hf


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--full", action="store_true", help="train all weights instead of an adapter")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", default="Alice was beginning to ")
    parser.set_defaults(learning_rate=None)  # an adapter takes a higher one than all weights
    args = parser.parse_args()
    args.learning_rate = args.learning_rate or (5e-4 if args.full else 3e-3)
    return args


def train(model: Any, tokenizer: Any, args: argparse.Namespace, folder: Path) -> None:
    """Train on packed paragraphs and save to `folder`."""
    documents: Any = [
        {"input_ids": tokenizer(text, truncation=True, max_length=args.length)["input_ids"]}
        for text in paragraphs(args)
    ]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=args.learning_rate,
            bf16=precision() == "bf16",
            gradient_checkpointing=args.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False} if args.checkpointing else None,
            logging_steps=max(1, args.steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=documents,
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )
    trainer.train()
    trainer.save_model(str(folder))


def continuation(model: Any, tokenizer: Any, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    made = model.eval().generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(made[0], skip_special_tokens=True)


def main() -> None:
    args = parse()
    base, tokenizer = load(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.output or Path(scratch, "result")
        start = Path(scratch, "start")
        base.save_pretrained(start)  # an adapter remembers which weights it belongs to
        base = AutoModelForCausalLM.from_pretrained(start, attn_implementation=args.attn)
        model = base
        if not args.full:
            layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
            model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=layers))
            model.print_trainable_parameters()
            if args.checkpointing:
                model.enable_input_require_grads()
        train(model, tokenizer, args, folder)
        print(ffpa_hf.report(model))
        trained = continuation(model, tokenizer, args.prompt)
        kind: Any = AutoModelForCausalLM if args.full else AutoPeftModelForCausalLM
        again = kind.from_pretrained(folder, attn_implementation=args.attn).to(model.device)
        if not args.full:
            again = again.merge_and_unload()
        with torch.no_grad():
            same = continuation(again, tokenizer, args.prompt) == trained
    print(f"loaded again, it writes {'the same' if same else 'something else'}: {trained!r}")


if __name__ == "__main__":
    main()
