"""The host side of repeated calls: what was prepared once is run again only for a call that is alike in every way."""

from __future__ import annotations

import pytest
import torch

from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.triton import choice, configs, launch


class Compiled:
    """What Triton returns from a launch: started with all arguments in the order of the signature."""

    def __init__(self, starts):
        self.starts = starts

    def __getitem__(self, grid):
        return lambda *arguments: self.starts.append((grid, arguments))


class Kernel:
    """A kernel that writes down how it is launched and computes nothing."""

    arg_names = ("a", "b", "FIRST", "SECOND")

    def __init__(self, arg_names=arg_names):
        self.arg_names = arg_names
        self.launches, self.starts = [], []

    def __getitem__(self, grid):
        def run(*arguments, **keywords):
            self.launches.append((grid, arguments, keywords))
            return Compiled(self.starts)

        return run


def test_the_second_run_starts_what_the_first_one_compiled():
    kernel = Kernel()
    step = launch._Launch(kernel, 5, {"num_warps": 4}, SECOND=2, FIRST=1)
    step("x", "y")
    step("z", None)
    assert kernel.launches == [((5, 1, 1), ("x", "y"), {"num_warps": 4, "FIRST": 1, "SECOND": 2})]
    assert kernel.starts == [((5, 1, 1), ("z", None, 1, 2))]


def test_a_kernel_that_compiles_nothing_is_launched_each_time():
    seen = []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *arguments, **keywords: seen.append(arguments)

    step = launch._Launch(Interpreted(), 1, {}, FIRST=1)
    step("x")
    step("y")
    assert seen == [("x",), ("y",)]


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the forward kernels, with the real signatures."""
    made = {}
    for name in ("attention_forward", "decode_split", "decode_combine"):
        made[name] = Kernel(getattr(launch, name).arg_names)
        monkeypatch.setattr(launch, name, made[name])
    monkeypatch.setattr(launch, "_repeated", {})
    monkeypatch.setattr(configs, "decode_splits", lambda *_: 3)
    return made


def inputs(q_len=2, kv_len=300, head_dim=64, dtype=torch.float16, **more):
    query = torch.randn(1, 4, q_len, head_dim).to(dtype)
    key, value = (torch.randn(1, 2, kv_len, head_dim).to(dtype) for _ in range(2))
    return AttentionInputs(query, key, value, more.pop("scale", 0.125), **more)


def counts(kernels):
    """(launches through Triton, starts of what it compiled) of each kernel, those that ran."""
    return {name: (len(kernel.launches), len(kernel.starts)) for name, kernel in kernels.items() if kernel.launches}


def test_a_repeated_decode_call_starts_its_kernels_with_its_own_tensors(kernels):
    launch.forward(inputs(), 1024)
    again = inputs()
    out, lse, _ = launch.forward(again, 1024)
    assert counts(kernels) == {"decode_split": (1, 1), "decode_combine": (1, 1)}
    for name, kernel in kernels.items():
        if kernel.launches:
            (grid, first, keywords), (same_grid, second) = kernel.launches[0], kernel.starts[0]
            assert grid == same_grid and len(second) == len(kernel.arg_names), name
            constants = dict(zip(kernel.arg_names, second, strict=True))
            assert all(constants[key] == value for key, value in keywords.items() if key in kernel.arg_names)
            for before, after in zip(first, second[: len(first)], strict=True):
                if isinstance(before, torch.Tensor):
                    assert before.shape == after.shape and before.data_ptr() != after.data_ptr()
                else:
                    assert before == after
    started = dict(zip(kernels["decode_split"].arg_names, kernels["decode_split"].starts[0][1], strict=True))
    assert started["q"] is again.query and started["out"] is out and started["lse"] is lse


def test_a_repeated_fused_call_starts_its_kernel(kernels):
    for _ in range(3):
        launch.forward(inputs(q_len=40), 1024)
    assert counts(kernels) == {"attention_forward": (1, 2)}


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5}, {"is_causal": True}, {"softcap": 3.0}, {"kv_len": 301}, {"q_len": 3}, {"head_dim": 72},
        {"dtype": torch.float32}, {"q_len": 40},
    ],
    ids=str,
)  # fmt: skip
def test_a_call_that_differs_is_prepared_anew(kernels, change):
    launch.forward(inputs(), 1024)
    launch.forward(inputs(**change), 1024)
    assert sum(kernel.starts != [] for kernel in kernels.values()) == 0


def test_other_strides_tables_limits_and_flags_are_prepared_anew(kernels, monkeypatch):
    launch.forward(inputs(), 1024)
    strided = inputs()
    strided.key = strided.key.transpose(1, 2).contiguous().transpose(1, 2)
    launch.forward(strided, 1024)
    launch.forward(inputs(), 512)
    monkeypatch.setattr(launch, "FORCE_WIDE", True)
    launch.forward(inputs(), 1024)
    choice.forget()
    launch.forward(inputs(), 1024)
    assert counts(kernels) == {"decode_split": (5, 0), "decode_combine": (5, 0)}


@pytest.mark.parametrize("what", ["mask", "bias", "sinks", "intervals", "key_mask", "dropout", "tiles"])
def test_calls_with_more_tensors_always_go_through_triton(kernels, what):
    extra = {
        "mask": {"mask": torch.ones(1, 1, 2, 300, dtype=torch.bool)},
        "bias": {"bias": torch.zeros(1, 1, 2, 300)},
        "sinks": {"sinks": torch.zeros(4)},
        "intervals": {
            "row_start": torch.zeros(1, 2, dtype=torch.int32),
            "row_end": torch.full((1, 2), 9, dtype=torch.int32),
        },
        "key_mask": {"key_mask": torch.ones(1, 300, dtype=torch.bool)},
        "dropout": {"dropout_p": 0.5, "rng_state": torch.zeros(2, dtype=torch.int64)},
    }.get(what, {})
    tiles = sorted({config for _, config in configs._DECODE}, key=repr)[0] if what == "tiles" else None
    for _ in range(2):
        launch.forward(inputs(**extra), 1024, tiles=tiles)
    assert counts(kernels) == {"decode_split": (2, 0), "decode_combine": (2, 0)}


def test_a_kernel_put_in_the_place_of_another_is_the_one_that_runs(kernels, monkeypatch):
    launch.forward(inputs(), 1024)
    other = Kernel(launch.decode_split.arg_names)
    monkeypatch.setattr(launch, "decode_split", other)
    launch.forward(inputs(), 1024)
    assert len(other.launches) == 1 and len(kernels["decode_split"].launches) == 1
