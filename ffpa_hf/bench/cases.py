"""What is timed: one frozen row per attention shape, with the FLOPs it counts for. Pure data; knows no provider.

The ids are those under which results are published, so a row is never changed once it has been measured.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

Direction = Literal["fwd", "bwd", "fwd+bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Case:
    """One attention call to time.

    heads:kv_heads, q_len x kv_len and head_dim as in `[B, H, N, D]`. window: causal sliding window, in keys up to and
    with the row's own. directions: what runs when none are asked for. kv_sets: so many key/value pairs are read in
    turn, so that they do not stay in the cache. graph: the calls are captured in one CUDA graph and replayed. form: a
    random "bool" or "additive" mask over all pairs, or "padded": causal, and every eighth key missing.
    documents: the rows are that many packed documents of one length, causal within each. host: what is timed is the
    host, by `overhead`.
    """

    id: str
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    kv_heads: int = 0
    batch: int = 1
    causal: bool = False
    window: int | None = None
    directions: tuple[Direction, ...] = ("fwd",)
    kv_sets: int = 1
    graph: bool = False
    dtype: str = "bfloat16"
    form: Literal["plain", "bool", "additive", "padded"] = "plain"
    documents: int = 0
    host: bool = False

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.id}: {self.heads} query heads over {self.kv_heads} key heads")
        if self.window is not None and not self.causal:
            raise ValueError(f"{self.id}: a window is causal here")
        if self.window is not None and self.q_len != self.kv_len:
            raise ValueError(f"{self.id}: a window is counted for square shapes only")
        if self.form != "plain" and (self.window is not None or self.causal != (self.form == "padded")):
            raise ValueError(f"{self.id}: a {self.form} mask beside another one")
        if self.documents and (not self.causal or self.window or self.q_len != self.kv_len):
            raise ValueError(f"{self.id}: packed documents are square and causal here")
        if self.documents and self.q_len % self.documents:
            raise ValueError(f"{self.id}: {self.q_len} rows are not {self.documents} documents of one length")
        if self.graph and self.directions != ("fwd",):
            raise ValueError(f"{self.id}: a captured case runs forward only")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def mask(self) -> Literal["none", "causal", "window", "bool", "additive", "padded"]:
        """The kind of mask, as tables name it."""
        if self.form != "plain":
            return self.form
        return "window" if self.window is not None else "causal" if self.causal else "none"

    def pairs(self) -> float:
        """Query-key pairs of one head that the mask allows; a square causal mask counts half of N^2."""
        if self.documents:
            return self.q_len * (self.q_len // self.documents) / 2
        if not self.causal:
            return float(self.q_len * self.kv_len)
        if self.window is None and self.q_len == self.kv_len:
            return self.q_len * self.kv_len / 2
        reach = self.kv_len if self.window is None else min(self.window, self.kv_len)
        ramp = min(self.q_len, reach)
        return float(ramp * (ramp + 1) // 2 + (self.q_len - ramp) * reach)

    def flops(self, direction: Direction) -> float:
        """4 B Hq D per allowed pair forward, 2.5 times that backward, whatever a kernel recomputes."""
        forward = 4.0 * self.batch * self.heads * self.head_dim * self.pairs()
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[direction]

    def text(self) -> str:
        """The shape in words, for lists."""
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}:{self.kv_heads}"
        length = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} x {self.kv_len}"
        mask = {"none": "", "window": f", causal window {self.window}", "padded": ", causal, padded keys"}.get(
            self.mask, f", {self.mask}"
        )
        extra = f", {self.kv_sets} K/V sets in a CUDA graph" if self.graph else ""
        extra += f", {self.documents} packed documents" if self.documents else ""
        extra += ", host time" if self.host else ""
        return f"B={self.batch}, {heads} heads, {length}, D={self.head_dim}{mask}{extra}"


def _self(id: str, head_dim: int, length: int, heads: int, *directions: Direction, **more) -> Case:
    return Case(id, heads, length, length, head_dim, directions=directions or ("fwd",), **more)


#: The published cases.
KERNEL: tuple[Case, ...] = (
    _self("d512_self_8k", 512, 8192, 32, "fwd", "bwd"),
    _self("d512_causal_8k", 512, 8192, 32, "fwd", "bwd", causal=True),
    _self("d512_gqa_causal_8k", 512, 8192, 32, "fwd", "bwd", kv_heads=4, causal=True),
    _self("d512_1h_16k", 512, 16384, 1),
    Case("d512_cross_1k_8k", 32, 1024, 8192, 512),
    Case("d512_decode_8k", 32, 1, 8192, 512, kv_heads=4, kv_sets=4, graph=True),
    _self("d320_self_8k", 320, 8192, 32, "fwd", "bwd"),
    _self("d384_self_8k", 384, 8192, 32, "fwd", "bwd"),
    _self("d640_self_4k", 640, 4096, 16, "fwd", "bwd"),
    _self("d1024_self_4k", 1024, 4096, 16, "fwd", "bwd"),
    _self("d256_self_8k", 256, 8192, 32, "fwd", "bwd"),
    _self("d256_window1k_8k", 256, 8192, 32, "fwd", "bwd", kv_heads=16, causal=True, window=1024),
    _self("d128_flux", 128, 4608, 24),
    _self("d64_cogvideox", 64, 17776, 48, batch=2),
    _self("d128_self_16k", 128, 16384, 32),
)

_SWEEP_WINDOW = 1024


def sweep_case(
    head_dim: int, heads: int, q_len: int, kv_len: int, mask: str = "none", group: int = 1, **more: Any
) -> Case:
    """A case of the sweep under the id from which tables read its shape. heads: batch times query heads."""
    fields: dict[str, Any] = {"causal": mask in ("causal", "window", "padded")}
    fields |= {"window": min(_SWEEP_WINDOW, max(1, q_len // 2))} if mask == "window" else {}
    fields |= {"form": mask} if mask in ("bool", "additive", "padded") else {}
    decode = {"kv_sets": 4} if q_len < 8 else {}
    return Case(
        f"sweep_d{head_dim}_h{heads}_g{group}_q{q_len}_k{kv_len}_{mask}",
        heads,
        q_len,
        kv_len,
        head_dim,
        kv_heads=heads // group,
        directions=("fwd", "fwd+bwd"),
        **{**fields, **decode, **more},
    )


def _sweep() -> Iterator[Case]:
    """Grids within each class of calls that the table of automatic choices tells apart, coarse on each axis."""
    square = itertools.product((64, 128, 256, 320, 512, 1024), ("none", "causal"), (128, 512, 2048, 8192))
    for head_dim, mask, length in square:
        yield sweep_case(head_dim, 16, length, length, mask)
    for head_dim, mask, length in itertools.product((320, 512, 1024), ("none", "causal"), (512, 4096)):
        yield sweep_case(head_dim, 1, length, length, mask)
    for head_dim, length in ((512, 16384), (512, 32768), (128, 32768)):  # image autoencoders, long video
        yield sweep_case(head_dim, 1, length, length)
    for head_dim, length in itertools.product((64, 128, 256, 512), (512, 8192)):
        yield sweep_case(head_dim, 16, length, length, "window")
    for head_dim, length in itertools.product((64, 128, 256, 512, 1024), (512, 4096)):
        yield sweep_case(head_dim, 16, length, length, "padded")
        yield sweep_case(head_dim, 16, length, length, "bool")
    for head_dim, length in itertools.product((256, 512), (512, 4096)):
        yield sweep_case(head_dim, 1, length, length, "padded")
    for head_dim, length in itertools.product((128, 256, 512), (512, 4096)):
        yield sweep_case(head_dim, 32, length, length, "causal", group=8)
    for head_dim, q_len, kv_len in itertools.product((128, 256, 512), (64, 512), (4096, 16384)):
        yield sweep_case(head_dim, 32, q_len, kv_len)  # few queries over many keys
    for head_dim, kv_len in itertools.product((64, 128, 512), (128, 512)):
        yield sweep_case(head_dim, 16, 4096, kv_len)  # cross attention to a text
    for head_dim, kv_len in itertools.product((64, 128, 256, 512), (1024, 8192, 32768)):
        yield sweep_case(head_dim, 32, 1, kv_len, group=8)
    for head_dim, kv_len in itertools.product((64, 128, 256, 512), (1024, 8192)):
        yield sweep_case(head_dim, 8, 1, kv_len, group=4)
        yield sweep_case(head_dim, 32, 1, kv_len, "padded", group=8)
        yield sweep_case(head_dim, 32, 1, kv_len, "bool", group=8)  # a padded prompt, as transformers hands it over
    for head_dim, kv_len in itertools.product((128, 512), (1024, 8192)):
        yield sweep_case(head_dim, 32, 1, kv_len)
    for head_dim in (128, 512):
        yield sweep_case(head_dim, 256, 1, 8192, group=8)
    for head_dim in (128, 512):
        yield sweep_case(head_dim, 16, 2048, 2048, "additive")  # decided by rule; here to be seen


def sweep_cases_of(calls: Iterable[AttentionCall]) -> list[Case]:
    """Cases of the shapes of some calls, each once; calls that auto does not decide by its table are left out.

    Intervals become two cases where the lengths agree: padding, and a window.
    """
    found: dict[str, Case] = {}
    for call in calls:
        mask = "causal" if call.is_causal else call.mask_kind
        plain = call.sdpa_expresses() is None and not call.has_bias and call.dropout_p == 0 and call.rank == 4
        served = 64 <= call.head_dim <= 1024 and call.head_dim % 8 == 0 and call.value_dim == call.head_dim
        empty = 0 in (call.batch, call.q_heads, call.q_len, call.kv_len)
        if not plain or not served or empty or call.dtype not in (torch.bfloat16, torch.float16):
            continue
        kinds = ["padded", "window"] if mask == "intervals" and call.q_len == call.kv_len else [mask]
        for kind in kinds:
            lengths = call.q_len, call.kv_len
            name = "padded" if kind == "intervals" else kind
            group = call.q_heads // call.kv_heads
            case = sweep_case(call.head_dim, call.batch * call.q_heads, *lengths, name, group)
            found[case.id] = case
    return list(found.values())


#: The grid from which the table of automatic choices is built, and over which it is judged.
SWEEP: tuple[Case, ...] = tuple(_sweep())

#: The same in sizes that any CPU can take, for the tool's own test.
SWEEP_TINY: tuple[Case, ...] = (
    sweep_case(64, 2, 32, 32, dtype="float32"),
    sweep_case(64, 2, 32, 32, "padded", dtype="float32"),
    sweep_case(64, 2, 32, 32, "bool", dtype="float32"),
    sweep_case(64, 2, 32, 32, "window", dtype="float32"),
    sweep_case(64, 2, 32, 32, "additive", dtype="float32"),
    sweep_case(72, 4, 1, 64, group=2, dtype="float32"),
    sweep_case(64, 2, 16, 128, dtype="float32"),
)

#: Documents packed into one row, as a training step without padding has them.
PACKED: tuple[Case, ...] = tuple(
    _self(f"d{d}_packed16_16k", d, 16384, 32, "fwd", "bwd", kv_heads=8, causal=True, documents=16)
    for d in (128, 256, 512)
)

#: What a small call costs the host.
OVERHEAD: tuple[Case, ...] = (
    Case("host_d128_decode_1k", 32, 1, 1024, 128, kv_heads=8, host=True),
    Case("host_d512_decode_1k", 32, 1, 1024, 512, kv_heads=4, host=True),
)

#: The one attention head of autoencoders' mid-blocks, at the tokens of a 1024px and a 2048px image. 384: Wan 2.1 and
#: QwenImage; 512: Stable Diffusion, FLUX; 640 and 1024: Wan 2.2 (and HunyuanVideo 1.5); 768 and 1152: QwenImage 2.1,
#: the last wider than any kernel, so that it is SDPA's.
VAE: tuple[Case, ...] = tuple(
    _self(f"vae_d{head_dim}_{size}px", head_dim, length, 1)
    for head_dim, lengths in (
        (384, (16384, 65536)),
        (512, (16384, 65536)),
        (640, (4096, 16384)),
        (768, (4096, 16384)),
        (1024, (4096, 16384)),
        (1152, (4096, 16384)),
    )
    for size, length in zip((1024, 2048), lengths, strict=True)
)

#: Small enough for any CPU: the tool's own test.
CPU_SMOKE: tuple[Case, ...] = (
    _self("cpu_self", 64, 48, 2, "fwd", "bwd", dtype="float32"),
    _self("cpu_gqa_causal", 64, 40, 4, "fwd", "fwd+bwd", kv_heads=2, causal=True, dtype="float32"),
    _self("cpu_window", 72, 56, 2, "fwd", kv_heads=1, causal=True, window=16, dtype="float32"),
    _self("cpu_packed", 64, 48, 4, "fwd", "fwd+bwd", kv_heads=2, causal=True, documents=3, dtype="float32"),
)

SETS: dict[str, tuple[Case, ...]] = {
    "kernel": KERNEL,
    "packed": PACKED,
    "vae": VAE,
    "overhead": OVERHEAD,
    "sweep": SWEEP,
    "sweep_tiny": SWEEP_TINY,
    "cpu_smoke": CPU_SMOKE,
}


def select(patterns: Iterable[str]) -> tuple[Case, ...]:
    """Cases of the named sets, by id, or by glob ("d512_*"), each once and in table order.

    Raises ValueError for a pattern that matches nothing.
    """
    everything = [*KERNEL, *PACKED, *VAE, *OVERHEAD, *SWEEP, *SWEEP_TINY, *CPU_SMOKE]
    chosen: set[str] = set()
    for pattern in patterns:
        found = [case.id for case in SETS[pattern]] if pattern in SETS else []
        found = found or [case.id for case in everything if fnmatch.fnmatchcase(case.id, pattern)]
        if not found:
            raise ValueError(f"cases={pattern!r} matches no case; use a set ({', '.join(SETS)}), an id or a glob.")
        chosen.update(found)
    return tuple(case for case in everything if case.id in chosen)
