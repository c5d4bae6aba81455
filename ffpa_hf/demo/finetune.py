"""Fine-tuning with Accelerate: a small model of Gemma 4's architecture on Alice in Wonderland, "sdpa" against "ffpa".

What makes Gemma 4 hard for attention kernels is all there: sliding layers with head dim 256 and a window, global layers
with head dim 512, grouped key/value heads. Weights are random and tokens are bytes, because the demo downloads nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ffpa_hf.demo.evidence import Check, Site, SiteClock, every_call_counted, sites_of
from ffpa_hf.report import reset

#: "eager" is PyTorch's other way to the same numbers: how far it drifts from "sdpa" is what rounding alone does.
IMPLEMENTATIONS = ("sdpa", "eager", "ffpa")
#: A loss curve may drift this many times as far from "sdpa" as "eager" has so far: training amplifies rounding, by
#: chance more in one run than in another, but alike for alike kernels.
TIMES_EAGER_DRIFT = 4.0
#: ... plus this share of the loss, for steps where eager happens to agree: about 100 fp32 roundings, or a quarter of a
#: bf16 one (a loss is a mean over many tokens, in which their roundings mostly cancel).
DRIFT_FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
#: First-step gradients may be this many times as far from fp64 as those of "sdpa".
TIMES_SDPA_ERROR = 2.0


@dataclass(frozen=True)
class Recipe:
    """Sizes of the model and of the training run. Tokens are bytes, unless a larger vocabulary is given.

    learning_rate is reached after five steps; it is low enough that rounding is not amplified into another curve.
    """

    hidden: int
    intermediate: int
    layers: int
    global_every: int
    heads: int
    key_value_heads: int
    sequence: int
    window: int
    batch: int
    steps: int
    learning_rate: float
    sliding_head_dim: int = 256
    global_head_dim: int = 512
    vocabulary: int = 256


ON_CPU = Recipe(
    hidden=192,
    intermediate=768,
    layers=4,
    global_every=2,
    heads=4,
    key_value_heads=2,
    sequence=256,
    window=64,
    batch=2,
    steps=40,
    learning_rate=6e-4,
)
ON_GPU = Recipe(
    hidden=1024,
    intermediate=4096,
    layers=6,
    global_every=6,
    heads=8,
    key_value_heads=2,
    sequence=2048,
    window=512,
    batch=4,
    steps=100,
    learning_rate=3e-4,
)


@dataclass
class Run:
    """One training run: loss in nats per byte and wall-clock seconds, per step."""

    implementation: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def seconds_per_step(self) -> float:
        """Median, so that compiling kernels in the first step does not count."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class FinetuneResult:
    """`limits` is the allowed distance from the "sdpa" loss per step."""

    runs: dict[str, Run]
    limits: list[float]
    recipe: Recipe
    dtype: torch.dtype
    parameters: int
    text_bytes: int
    checks: list[Check]
    sites: list[Site]


class Windows(Dataset):
    """`count` windows of `length` bytes from the text, at places drawn from `seed`; each item is int64 [length]."""

    def __init__(self, text: bytes, length: int, count: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._length = length
        draw = torch.Generator().manual_seed(seed)
        self._starts = torch.randint(0, len(text) - length, (count,), generator=draw).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self._starts[index]
        return self._text[start : start + self._length]


def read_text() -> bytes:
    """The training text shipped with the demo (public domain, see data/LICENCE.md)."""
    return (resources.files("ffpa_hf.demo") / "data" / "alice.txt").read_bytes()


def write_checkpoint(recipe: Recipe, folder: Path, seed: int) -> None:
    """Save a randomly initialised Gemma 4 text model, so that each run loads the same weights with from_pretrained."""
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    kinds = [
        "full_attention" if (i + 1) % recipe.global_every == 0 else "sliding_attention" for i in range(recipe.layers)
    ]
    config = Gemma4TextConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        layer_types=kinds,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        head_dim=recipe.sliding_head_dim,
        global_head_dim=recipe.global_head_dim,
        sliding_window=recipe.window,
        max_position_embeddings=recipe.sequence,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        attention = layer.self_attn
        # Gemma 4 has no 1/sqrt(head_dim): its norm weights learn that. Left at one, random weights would give a nearly
        # one-hot softmax, and training would amplify the last bit of a sum into another curve within five steps.
        for norm in (attention.q_norm, attention.k_norm):
            torch.nn.init.constant_(norm.weight, attention.head_dim**-0.25)
    model.save_pretrained(folder)


def run_finetune(
    device: torch.device,
    *,
    recipe: Recipe | None = None,
    steps: int | None = None,
    seed: int = 0,
    advance: Callable[[str], None] = lambda what: None,
) -> FinetuneResult:
    """Train the same weights on the same batches with each of `IMPLEMENTATIONS` and compare.

    fp32 on a CPU, bf16 autocast through Accelerate elsewhere. advance is told what has just been done, once per
    training step and once per gradient. Raises ImportError where transformers or accelerate is missing.
    """
    from accelerate import Accelerator
    from transformers.utils import logging

    logging.disable_progress_bar()
    on_cpu = device.type == "cpu"
    recipe = recipe or (ON_CPU if on_cpu else ON_GPU)
    steps = steps or recipe.steps
    dtype = torch.float32 if on_cpu else torch.bfloat16
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no" if on_cpu else "bf16")
    text = read_text()
    windows = Windows(text, recipe.sequence, steps * recipe.batch, seed)
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(recipe, Path(folder), seed)
        checks.append(_gradient_check(folder, windows, recipe.batch, accelerator, advance))
        trainers = [_Trainer(_load(folder, name), name, recipe, accelerator) for name in IMPLEMENTATIONS]
    reset()
    loader = accelerator.prepare(DataLoader(windows, batch_size=recipe.batch))
    with contextlib.ExitStack() as clocks:
        for trainer in trainers:
            clocks.enter_context(trainer.clock)
        for tokens in loader:  # in turns, so that whatever else the machine does slows all of them alike
            for trainer in trainers:
                trainer.step(tokens)
                advance(f"training with {trainer.run.implementation}")
    sdpa, _, ffpa = trainers
    checks.append(every_call_counted("Gemma 4", ffpa.model, ffpa.attention, ffpa.clock))
    sites = sites_of("Gemma 4", ffpa.model, sdpa.clock, ffpa.clock)
    runs = {trainer.run.implementation: trainer.run for trainer in trainers}
    curve, limits = _curve_check(runs, dtype)
    checks.append(curve)
    if steps >= 20:  # fewer are too few to learn from
        checks.append(_learning_check(runs["ffpa"]))
    parameters = sum(parameter.numel() for parameter in ffpa.model.parameters())
    return FinetuneResult(runs, limits, recipe, dtype, parameters, len(text), checks, sites)


def _load(folder: str, implementation: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).train()


class _Trainer:
    """One model with its optimizer and its clock; `step` is one training step."""

    def __init__(self, model: torch.nn.Module, implementation: str, recipe: Recipe, accelerator: Any) -> None:
        self.model = model  # as the report knows it, before Accelerate wraps its forward
        self.run = Run(implementation)
        self.attention = [name for name, _ in model.named_modules() if name.endswith("self_attn")]
        self.clock = SiteClock([(name, model.get_submodule(name)) for name in self.attention], accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        self._accelerator = accelerator
        self._prepared, self._optimizer, self._warm_up = accelerator.prepare(model, optimizer, warm_up)

    def step(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        loss = self._prepared(input_ids=tokens, labels=tokens).loss
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._prepared.parameters(), 1.0)
        self._optimizer.step()
        self._warm_up.step()
        self._optimizer.zero_grad()
        self.run.losses.append(loss.item())  # waits for the GPU, so the clock below is honest
        self.run.seconds.append(time.perf_counter() - start)


def _gradient_check(
    folder: str, windows: Windows, batch: int, accelerator: Any, advance: Callable[[str], None]
) -> Check:
    """Gradients of the first step, all parameters as one vector, against the same step in fp64."""
    tokens = torch.stack([windows[i] for i in range(batch)]).to(accelerator.device)

    def gradient(implementation: str, exact: bool = False) -> Tensor:
        model = _load(folder, implementation).to(accelerator.device)
        if exact:
            model = model.double()
            model(input_ids=tokens, labels=tokens).loss.backward()
        else:
            with accelerator.autocast():
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        advance(f"first gradient with {implementation}" + (" in fp64" if exact else ""))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return torch.cat([part.double().flatten() for part in gradients])

    truth = gradient("sdpa", exact=True)
    errors = {name: ((gradient(name) - truth).norm() / truth.norm()).item() for name in ("sdpa", "ffpa")}
    limit = TIMES_SDPA_ERROR * errors["sdpa"]
    return Check(
        name="Gemma 4: first-step gradient of all weights, ffpa against fp64, relative error",
        passed=errors["ffpa"] <= limit,
        measured=f"{errors['ffpa']:.1e}",
        allowed=f"{limit:.1e}",
        why=f"twice the error of PyTorch's sdpa in the same precision, {errors['sdpa']:.1e}",
    )


def _curve_check(runs: dict[str, Run], dtype: torch.dtype) -> tuple[Check, list[float]]:
    """Whether the "ffpa" curve stays as near to "sdpa" as rounding allows, and that allowance per step."""
    reference = runs["sdpa"].losses
    limits, drift = [], 0.0
    for loss, eager in zip(reference, runs["eager"].losses, strict=True):
        drift = max(drift, abs(eager - loss))
        limits.append(TIMES_EAGER_DRIFT * drift + DRIFT_FLOOR[dtype] * loss)
    gaps = [abs(ours - loss) for ours, loss in zip(runs["ffpa"].losses, reference, strict=True)]
    step = max(range(len(gaps)), key=lambda i: gaps[i] / limits[i] if gaps[i] == gaps[i] else float("inf"))
    check = Check(
        name=f"Gemma 4: loss curve over {len(gaps)} steps, ffpa against sdpa, nearest to its limit at step {step + 1}",
        passed=all(gap <= limit for gap, limit in zip(gaps, limits, strict=True)),
        measured=f"{gaps[step]:.1e}",
        allowed=f"{limits[step]:.1e}",
        why=f"{TIMES_EAGER_DRIFT:g} times the largest distance so far between the eager and sdpa runs, plus "
        f"{DRIFT_FLOOR[dtype]:g} of the loss",
    )
    return check, limits


def _learning_check(run: Run) -> Check:
    """A run that learns nothing would compare equal too: the last losses must lie clearly below the first."""
    tail = run.losses[-max(1, len(run.losses) // 5) :]
    last, first = sum(tail) / len(tail), run.losses[0]
    return Check(
        name="Gemma 4: the ffpa run learns, mean loss of the last fifth of the steps",
        passed=last < 0.9 * first,
        measured=f"{last:.2f} nats per byte",
        allowed=f"{0.9 * first:.2f} nats per byte",
        why=f"at most nine tenths of the first loss, {first:.2f}",
    )
