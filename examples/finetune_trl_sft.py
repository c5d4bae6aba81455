"""Supervised fine-tuning with TRL's SFTTrainer, packed, attention served by ffpa_hf. Needs `pip install trl`.

    python examples/finetune_trl_sft.py                      # best-fit packing (bfd) into rows of --length tokens
    python examples/finetune_trl_sft.py --packing padding_free
    accelerate launch examples/finetune_trl_sft.py --model NAME --text my.txt --lora --checkpointing

Both ways of packing hand the bounds of the documents to the attention, and "ffpa" keeps each document to itself
(tests/patches/test_trl.py compares with documents apart).
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from small_gemma4 import add_arguments, load, paragraphs, precision
from trl import SFTConfig, SFTTrainer

import ffpa_hf


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--packing", choices=["bfd", "padding_free", "none"], default="bfd")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all weights")
    return parser.parse_args()


def main() -> None:
    args = parse()
    model, tokenizer = load(args)
    adapter = None
    if args.lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    texts = paragraphs(args)
    packing: dict[str, Any] = {"max_length": args.length}
    if args.packing == "bfd":
        packing |= {"packing": True, "packing_strategy": "bfd"}
    elif args.packing == "padding_free":  # nothing is cut, so long documents are left out
        texts = [text for text in texts if len(tokenizer(text)["input_ids"]) < args.length]
        packing = {"padding_free": True, "max_length": None}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            peft_config=adapter,
            train_dataset=Dataset.from_dict({"text": texts}),
            args=SFTConfig(
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
                **packing,
            ),
        )
        trainer.train()
    print(ffpa_hf.report(trainer.model))
    if args.output:
        trainer.save_model(str(args.output))


if __name__ == "__main__":
    main()
