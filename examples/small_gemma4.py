"""What the examples train when no model is named: a small random Gemma 4 on Alice in Wonderland, nothing downloaded.

The model has what makes Gemma 4 hard for attention kernels: sliding layers of head dim 256 with a window, global ones
of head dim 512, grouped key/value heads. Its tokens are bytes.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from ffpa_hf.demo.finetune import ON_CPU, ON_GPU, read_text, write_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every example has."""
    parser.add_argument("--model", help="name or folder of a causal language model; none: a small random Gemma 4")
    parser.add_argument("--text", type=Path, help="a text file to train on; none: Alice in Wonderland")
    parser.add_argument("--attn", default="ffpa", help="attn_implementation: ffpa, sdpa or eager")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=2, help="sequences (or packed documents) per device and pass")
    parser.add_argument("--accumulate", type=int, default=1, help="passes per optimizer step")
    parser.add_argument("--length", type=int, default=256, help="most tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--output", type=Path, help="folder to save the result in")


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer): the named model, or the small one. Weights stay in float32; bf16 is autocast's business."""
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=args.attn, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(args.model)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    recipe = replace(ON_GPU if torch.cuda.is_available() else ON_CPU, vocabulary=len(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(recipe, Path(folder), seed=0)
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=args.attn), tokenizer


def paragraphs(args: argparse.Namespace) -> list[str]:
    """The training text in paragraphs, short ones left out: documents of unequal length, as packing is for."""
    text = (args.text.read_bytes() if args.text else read_text()).decode("utf-8")
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [part for part in found if len(part) >= 40]


def precision() -> str:
    """bf16 where the GPU has it, full precision on a CPU."""
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
