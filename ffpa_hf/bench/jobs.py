"""What is done with a model once: a training step, a forward pass, a generation. What it takes and what it gives.

A job runs on whatever attention the model has at the moment; which one that is, how long it takes and whether the
result is right is not its business.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

#: What is timed of a job, as result rows name it.
Direction = Literal["step", "fwd", "prefill", "decode"]


class Job(Protocol):
    """One piece of work with a model, its inputs drawn once.

    directions: what is timed, in order. run: one timed piece, which leaves gradients for `result` to read. result: the
    numbers to compare; `exact` asks for the plainest way to them. errors: relative errors by name, against a result.
    """

    directions: tuple[Direction, ...]

    def run(self, direction: Direction) -> None: ...
    def result(self, exact: bool = False) -> Any: ...
    def errors(self, result: Any, truth: Any) -> dict[str, float]: ...
    def milliseconds(self, direction: Direction, medians: dict[Direction, float]) -> float: ...
    def tokens(self, direction: Direction) -> int | None: ...


def distance(given: list[Tensor], truth: list[Tensor]) -> float:
    """||given - truth|| / ||truth|| over all tensors of a list together; NaN counts as infinitely far."""
    difference = norm = 0.0
    for mine, right in zip(given, truth, strict=True):
        difference += float((mine.to(right.dtype) - right).square().sum(dtype=torch.float64))
        norm += float(right.square().sum(dtype=torch.float64))
    found = math.sqrt(difference / norm) if norm else math.sqrt(difference)
    return found if math.isfinite(found) else math.inf


@contextlib.contextmanager
def parameters_in(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """The model's parameters in another dtype inside the `with` block; wider and back is exact. Buffers stay."""
    before = [(parameter, parameter.dtype) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.data = parameter.data.to(dtype)
    try:
        yield
    finally:
        for parameter, own in before:
            parameter.grad = None
            parameter.data = parameter.data.to(own)


class _Whole:
    """A job whose one direction takes what it is measured to take."""

    directions: tuple[Direction, ...]

    def milliseconds(self, direction: Direction, medians: dict[Direction, float]) -> float:
        return medians[direction]

    def errors(self, result: dict[str, list[Tensor]], truth: dict[str, list[Tensor]]) -> dict[str, float]:
        return {name: distance(result[name], truth[name]) for name in truth}


class TrainStep(_Whole):
    """Forward and backward of a causal language model, the loss as transformers computes it; no optimizer.

    lengths: tokens of each document of the one row. Several are packed: position_ids restart, the first token of a
    document is no label, and with `cu_seqlens` the bounds are passed too, as DataCollatorWithFlattening does.
    """

    directions: tuple[Direction, ...] = ("step",)

    def __init__(self, model: Any, device: torch.device, lengths: tuple[int, ...], cu_seqlens: bool = False) -> None:
        self.model, self.lengths = model, lengths
        tokens = torch.randint(model.config.vocab_size, (1, sum(lengths)), device=device)
        labels = tokens.clone()
        self.batch: dict[str, Any] = {"input_ids": tokens, "labels": labels, "use_cache": False}
        if len(lengths) > 1:
            ends = torch.tensor(lengths, device=device).cumsum(0)
            bounds = torch.nn.functional.pad(ends, (1, 0)).int()
            labels[0, bounds[:-1].long()] = -100
            self.batch["position_ids"] = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
            if cu_seqlens:
                self.batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
                self.batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        self.watched = [p for name, p in model.named_parameters() if ".self_attn." in name]

    def run(self, direction: Direction) -> None:
        self._clear()
        self.model(**self.batch).loss.backward()

    def result(self, exact: bool = False) -> dict[str, list[Tensor]]:
        """The loss, and the gradients of all attention weights; with `exact`, documents apart and checkpointed."""
        self._clear()
        loss = self._apart() if exact else self._packed()
        found = {"loss": [loss], "gradients": [p.grad for p in self.watched if p.grad is not None]}
        if len(found["gradients"]) != len(self.watched):
            raise RuntimeError("some attention weights got no gradient")
        self._clear()
        return found

    def tokens(self, direction: Direction) -> int:
        return sum(self.lengths)

    def _packed(self) -> Tensor:
        loss = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def _apart(self) -> Tensor:
        tokens = self.batch["input_ids"]
        count = sum(length - 1 for length in self.lengths)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        self.model.train()  # checkpointing is for training only
        with warnings.catch_warnings():  # newer transformers have another name for it, 5.17 has this one only
            warnings.simplefilter("ignore", FutureWarning)
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            for document in tokens.split(self.lengths, dim=1):
                part = self.model(input_ids=document, labels=document, use_cache=False).loss
                part = part * ((document.shape[1] - 1) / count)
                part.backward()
                total += part.detach()
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.model.gradient_checkpointing_disable()
            self.model.eval()
        return total

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class Forward(_Whole):
    """Inference on fixed inputs. call: the model's method by name; count: tokens it works on, None for pictures."""

    directions: tuple[Direction, ...] = ("fwd",)

    def __init__(self, model: Any, inputs: dict[str, Any], count: int | None, call: str = "forward") -> None:
        self.model, self.inputs, self.count, self.call = model, inputs, count, call

    def run(self, direction: Direction) -> None:
        self._output()

    def result(self, exact: bool = False) -> dict[str, list[Tensor]]:
        return {"output": [self._output()]}

    def tokens(self, direction: Direction) -> int | None:
        return self.count

    def _output(self) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        inputs = {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in self.inputs.items()
        }
        # the call of the module itself where there is one, so that its hooks and compiled form run
        function = self.model if self.call == "forward" else getattr(self.model, self.call)
        with torch.no_grad():
            return function(**inputs, return_dict=False)[0]


def decode(model: Any, device: torch.device, side: int) -> Forward:
    """An autoencoder's decoder on latents `[1, 16, side, side]`."""
    return Forward(
        model, {"z": torch.randn(1, model.config.latent_channels, side, side, device=device)}, None, "decode"
    )


def flux(model: Any, device: torch.device, side: int, text: int) -> Forward:
    """One denoising pass over side x side image tokens and `text` text tokens."""
    config = model.config
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    inputs = {  # a thousand times timestep and guidance must be bfloat16 numbers, or that rounding hides all others
        "hidden_states": torch.randn(1, side * side, config.in_channels, device=device),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, device=device),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, device=device),
        "timestep": torch.full((1,), 0.5, device=device),
        "guidance": torch.full((1,), 4.0, device=device),
        "img_ids": torch.nn.functional.pad(grid, (1, 0)).to(device),
        "txt_ids": torch.zeros(text, 3, dtype=torch.long, device=device),
    }
    return Forward(model, inputs, side * side + text)


def wan(model: Any, device: torch.device, frames: int, height: int, width: int, text: int) -> Forward:
    """One denoising pass over a video of latents `[1, 16, frames, height, width]`, patches of 1 x 2 x 2."""
    config = model.config
    inputs = {
        "hidden_states": torch.randn(1, config.in_channels, frames, height, width, device=device),
        "encoder_hidden_states": torch.randn(1, text, config.text_dim, device=device),
        "timestep": torch.full((1,), 500, device=device),
    }
    return Forward(model, inputs, frames * height * width // 4)


class Generate:
    """Greedy generate() with a static cache, eager: the prompt to the first token, then the time per further token."""

    directions: tuple[Direction, ...] = ("prefill", "decode")

    def __init__(self, model: Any, device: torch.device, prompt: int, new: int) -> None:
        self.model, self.new = model, new
        self.prompt = torch.randint(model.config.vocab_size, (1, prompt), device=device)

    def run(self, direction: Direction) -> None:
        self._generate(1 if direction == "prefill" else 1 + self.new)

    def result(self, exact: bool = False) -> tuple[Tensor, Tensor]:
        """The new tokens `[n]` and the logits they were chosen from `[n, vocabulary]`."""
        made = self._generate(1 + self.new, output_logits=True, return_dict_in_generate=True)
        return made.sequences[0, self.prompt.shape[1] :], torch.cat(made.logits)

    def errors(self, result: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> dict[str, float]:
        """Of the logits, up to where a rounding made another token the best: what follows is another text."""
        differs = (result[0] != truth[0]).int()
        same = int(differs.cumsum(0).eq(0).sum())
        return {"logits": distance([result[1][: same + 1]], [truth[1][: same + 1]])}

    def milliseconds(self, direction: Direction, medians: dict[Direction, float]) -> float:
        if direction == "prefill":
            return medians["prefill"]
        return (medians["decode"] - medians["prefill"]) / self.new

    def tokens(self, direction: Direction) -> int:
        return self.prompt.shape[1] if direction == "prefill" else 1

    def _generate(self, new: int, **more: Any) -> Any:
        return self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            **more,
        )
