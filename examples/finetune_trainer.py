"""Fine-tune with transformers' Trainer on documents packed without padding, attention served by ffpa_hf.

    python examples/finetune_trainer.py                      # offline: a small Gemma 4 on Alice in Wonderland
    python examples/finetune_trainer.py --padded             # the same documents padded to the longest
    accelerate launch examples/finetune_trainer.py --model NAME --text my.txt --checkpointing --accumulate 4

DataCollatorWithFlattening joins the documents of a batch into one row; attn_implementation="ffpa" keeps each document
to itself, by position_ids and by the bounds that return_flash_attn_kwargs adds.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from small_gemma4 import add_arguments, load, paragraphs, precision
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, Trainer, TrainingArguments

import ffpa_hf


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--padded", action="store_true", help="pad documents instead of packing them")
    return parser.parse_args()


def main() -> None:
    args = parse()
    model, tokenizer = load(args)
    documents: Any = [
        {"input_ids": tokenizer(text, truncation=True, max_length=args.length)["input_ids"]}
        for text in paragraphs(args)
    ]
    collator = (
        DataCollatorForLanguageModeling(tokenizer, mlm=False)
        if args.padded
        else DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(args.output or scratch),
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
            data_collator=collator,
        )
        trainer.train()
    print(ffpa_hf.report(model))
    if args.output:
        trainer.save_model(str(args.output))


if __name__ == "__main__":
    main()
