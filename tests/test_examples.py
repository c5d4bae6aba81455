"""The scripts in examples/ run as they are: offline, from the command line, and say what served the attention."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

FOLDER = Path(__file__).parents[1] / "examples"
SHORT = ("--steps", "2", "--length", "48")
#: What each example is run with here; nothing: as it is.
IN_CI = (
    ("finetune_accelerate", (*SHORT, "--batch", "1", "--lora", "--checkpointing", "--accumulate", "2")),
    ("finetune_trainer", SHORT),
    ("finetune_lora", (*SHORT, "--checkpointing")),
)
SLOW = (
    ("finetune_accelerate", ()),
    ("finetune_accelerate", (*SHORT, "--mixed-precision", "bf16")),
    ("finetune_trainer", ()),
    ("finetune_trainer", (*SHORT, "--padded", "--checkpointing", "--accumulate", "2")),
    ("finetune_lora", ()),
    ("finetune_lora", (*SHORT, "--full")),
    ("finetune_trl_sft", ()),
    ("finetune_trl_sft", (*SHORT, "--packing", "padding_free", "--lora", "--checkpointing")),
    ("finetune_trl_sft", (*SHORT, "--packing", "none", "--accumulate", "2")),
)


def run(name: str, *options: str, code: int = 0) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)  # as a user has it
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=environment,
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout if code == 0 else done.stderr


def losses(printed: str) -> list[float]:
    return [float(text) for text in re.findall(r"(?<![_\w])'?loss'?:? '?([0-9.]+)", printed)]


def check(name: str, options: tuple[str, ...], folder: Path) -> None:
    printed = run(name, *options, "--output", str(folder))
    seen = losses(printed)
    assert len(seen) >= 2 and all(0 < loss < 8 for loss in seen), printed
    # two steps are too few to learn from, and the first number is a mean over some steps already
    assert options or seen[-1] < 0.95 * seen[0], printed
    assert sum("self_attn" in line for line in printed.splitlines()) == 4, printed  # the report's row of each layer
    assert "B1 H4:2" in printed or "B2 H4:2" in printed
    adapter = "--lora" in options or (name == "finetune_lora" and "--full" not in options)
    assert (folder / ("adapter_config.json" if adapter else "config.json")).exists()
    if name == "finetune_lora":
        assert "it writes the same: 'Alice" in printed


@pytest.mark.parametrize(("name", "options"), IN_CI, ids=lambda value: value if isinstance(value, str) else "")
def test_example_trains_and_says_what_served_it(name, options, tmp_path):
    check(name, options, tmp_path / "made")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SLOW, ids=lambda value: value if isinstance(value, str) else "")
def test_example_in_full_and_with_its_options(name, options, tmp_path):
    check(name, options, tmp_path / "made")


@pytest.mark.slow
def test_own_model_and_text_and_sdpa_give_the_same_losses(tmp_path):
    """A saved model by name, a text file, and the two implementations side by side."""
    run("finetune_lora", *SHORT, "--full", "--output", str(tmp_path / "model"))
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Line {i} of a short text that is long enough, {i * 7 % 13}." for i in range(64)))
    options = ("--model", str(tmp_path / "model"), "--text", str(text), "--steps", "4", "--length", "48")
    curves = [losses(run("finetune_trainer", *options, "--attn", attn)) for attn in ("ffpa", "eager")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3) and len(curves[0]) == 4


@pytest.mark.slow
def test_too_little_text_is_refused_in_words(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("One paragraph which is longer than forty characters, and no more.")
    assert "less than one batch" in run("finetune_accelerate", "--text", str(text), code=1)


def test_every_example_is_run_here():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"small_gemma4"}
    assert scripts == {name for name, _ in SLOW}
    assert {name for name, _ in IN_CI} == scripts - {"finetune_trl_sft"}  # TRL brings 250 MB of packages
