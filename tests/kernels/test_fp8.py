"""The FP8 kernels without a GPU: they compile, use the promised instructions, spill nothing, fit Hopper; and tiles."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import pytest
import torch

from ffpa_hf import explain, settings
from ffpa_hf.backends import CUDABackend
from ffpa_hf.call import AttentionCall
from ffpa_hf.kernels import quantised_reference as quantised
from ffpa_hf.kernels import selftest_fp8
from ffpa_hf.kernels.common import Accepted, AttentionInputs, Refused
from ffpa_hf.kernels.cuda import fp8, fp8_configs

pytest.importorskip("cuda.bindings.nvrtc", reason="pip install 'ffpa-hf[cuda]' brings NVRTC")

from test_cuda_compile import inspect  # noqa: E402

from ffpa_hf.kernels.cuda import fp8_launch, launch, program  # noqa: E402

BUILT = [config.head_dim for config in fp8_configs.CONFIGS]
EVERYTHING = {"intervals": True, "mask": True, "key_mask": True, "bias": torch.float32}


@pytest.fixture(autouse=True)
def kept(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setattr("ffpa_hf.kernels.compile_cache.directory", lambda: folder)


def check_forward(head_dim: int, dtype: torch.dtype, tmp_path, **features) -> None:
    reads = any(features.get(name) for name in ("mask", "key_mask", "bias"))
    config = fp8_configs.choose(head_dim, reads)
    variant = fp8_launch.forward_variant(dtype, config, **features)
    listing, registers, stack = inspect(program.compile_variant(variant), tmp_path)
    assert stack == 0, f"{variant} spills {stack} bytes"
    assert registers * config.threads <= 65536
    assert "QGMMA.64x128x32.F32.E4M3.E4M3" in listing  # scores
    products = {int(width) for width in re.findall(r"QGMMA\.64x(\d+)x32", listing)}
    columns = head_dim // config.slices
    assert max(products - {128}, default=128) <= columns and (config.promote or columns in products)
    assert "UBLKCP" in listing and "USETMAXREG" in listing and "HGMMA" not in listing
    # One wait per group of products: more would mean that the compiler runs them one by one.
    assert listing.count("WARPGROUP.DEPBAR") <= 6


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_the_forward_uses_hoppers_8_bit_products(head_dim, tmp_path):
    check_forward(head_dim, torch.bfloat16, tmp_path, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("features", [{}, {"intervals": True}, {"mask": True}, EVERYTHING],
                         ids=["plain", "intervals", "mask", "everything"])  # fmt: skip
@pytest.mark.parametrize("head_dim", BUILT)
def test_every_forward_compiles_without_spills(head_dim, features, tmp_path):
    check_forward(head_dim, torch.float16, tmp_path, **features)


@pytest.mark.parametrize("name", ["fp8_statistics", "fp8_finish", "fp8_codes"])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_the_quantiser_compiles(name, head_dim, tmp_path):
    variant = fp8_launch.variant(name, torch.float16, fp8_configs.config_of(head_dim))
    listing, _, stack = inspect(program.compile_variant(variant), tmp_path)
    assert stack == 0
    if name == "fp8_codes":
        assert "F2FP.SATFINITE.E4M3.F32.PACK_AB" in listing


def test_every_tile_fits_hopper_and_every_head_dim_has_one():
    for config in fp8_configs.CONFIGS:
        assert config.smem <= fp8_configs.SMEM_LIMIT
        assert config.k_slots >= config.chunks  # a step's keys are all in the ring at once
    for head_dim in range(64, 513, 8):
        config = fp8_configs.config_of(head_dim)
        assert config.head_dim >= head_dim and config.head_dim - head_dim < 128
        assert fp8_configs.choose(head_dim, True).smem <= fp8_configs.SMEM_LIMIT
    with pytest.raises(ValueError, match="520"):
        fp8_configs.config_of(520)


@pytest.mark.parametrize(
    "file, name, kind",
    [
        ("fp8_call.cuh", "Quantise", fp8_launch._Quantise),
        ("fp8_forward.cu", "Fp8Call", fp8_launch._Forward),
    ],
)
def test_host_and_device_agree_on_the_argument(file, name, kind):
    from cuda.core import Program, ProgramOptions

    source = (program.SOURCES / file).read_text("utf-8")
    body = re.sub(r"//.*", "", source.split(f"struct {name} {{")[1].split("};")[0])
    declared = [re.sub(r".*[ *]", "", part.strip()) for line in body.split(";") for part in line.split(",")]
    assert [part for part in declared if part] == [field for field, *_ in kind._fields_]
    config = fp8_configs.config_of(128)
    variant = fp8_launch.forward_variant(torch.bfloat16, config)
    macros = [(macro, str(value)) for macro, value in variant.macros]
    options = ProgramOptions(arch="sm_90a", std="c++17", include_path=[str(program.SOURCES)], define_macro=macros)
    text = (program.SOURCES / "fp8_forward.cu").read_text("utf-8") + '\n#include "fp8_call.cuh"\n'
    text += f"static_assert(sizeof({name}) == {ctypes.sizeof(kind)});\nstatic_assert(Q_FULL + 8 == {config.smem});\n"
    Program(text, "c++", options).compile("cubin")


# --- tiles ------------------------------------------------------------------------------------------------------------


def packed(codes: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """`[heads, N, D]` in tiles of `rows` x `width` bytes, byte by byte, as src/fp8.cuh swizzles them."""
    heads, length, columns = codes.shape
    tiles = torch.full((heads, -(-length // rows), -(-columns // width), rows, width), 0xAA, dtype=torch.uint8)
    for row in range(length):
        for column in range(columns):
            at, byte = row % rows, column % width
            turn = at & 7 if width == 128 else (at >> 1) & 3
            place = ((byte >> 4) ^ turn) * 16 + (byte & 15)
            tiles[:, row // rows, column // width, at, place] = codes[:, row, column]
    return tiles


@pytest.mark.parametrize("rows, width, columns", [(64, 64, 64), (128, 128, 96), (64, 128, 160)])
def test_row_tiles_come_back_as_they_were(rows, width, columns):
    codes = torch.randint(0, 256, (2, rows + 9, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(selftest_fp8.row_codes(packed(codes, rows, width))[:, : rows + 9, :columns], codes)


def test_value_tiles_come_back_as_they_were():
    codes = torch.randint(0, 256, (2, 128, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    places = codes.unflatten(1, (8, 16))[:, :, quantised.value_order()].flatten(1, 2)  # keys in the places' order
    tiles = packed(places.transpose(1, 2).contiguous(), 64, 128)[:, :, 0]  # one tile: 64 channels x 128 keys
    assert torch.equal(selftest_fp8.value_codes(tiles), codes)


def test_shared_heads_are_quantised_once():
    x = torch.empty(2, 1, 10, 64)
    assert fp8_launch._distinct(torch.empty(2, 4, 10, 64)) == (8, 4, 4, 1)
    assert fp8_launch._distinct(x.expand(2, 4, 10, 64)) == (2, 1, 1, 0)
    assert fp8_launch._distinct(x[:1].expand(3, 4, 10, 64)) == (1, 1, 0, 0)
    assert fp8_launch._distinct(torch.empty(1, 4, 10, 64).expand(3, 4, 10, 64)) == (4, 4, 0, 1)


def test_scratch_tensors_do_not_overlap():
    sizes = [((3, 5), torch.uint8), ((7,), torch.float32), ((2, 2), torch.float32)]
    made = list(fp8_launch._carve(torch.device("cpu"), sizes))
    for tensor, (shape, dtype) in zip(made, sizes, strict=True):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.data_ptr() % 4 == 0
    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()) for tensor in made]
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


# --- what is served ---------------------------------------------------------------------------------------------------


def call(**changes) -> AttentionCall:
    usual = AttentionCall(
        batch=1, q_heads=8, kv_heads=8, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype=torch.bfloat16,
        device_type="cuda", capability=(9, 0), device_name="NVIDIA H200",
    )  # fmt: skip
    return replace(usual, **changes)


@pytest.mark.parametrize(
    "changes, config, kind, words",
    [
        ({"dtype": torch.float32}, {}, "error", "float32"),
        ({"dropout_p": 0.1}, {}, "error", "dropout"),
        ({"softcap": 5.0}, {}, "error", "softcap"),
        ({"has_sinks": True}, {}, "error", "sinks"),
        ({"head_dim": 520, "value_dim": 520}, {}, "fallback", "64 to 512"),
        ({"capability": (8, 9)}, {}, "fallback", "sm_89"),
        ({"capability": (12, 0)}, {}, "fallback", "sm_120"),
        ({"is_rocm": True}, {}, "fallback", "ROCm"),
        ({}, {"qk": "int8"}, "unqualified", "qk='int8'"),
        ({}, {"family": "native"}, "unqualified", "family='native'"),
        ({"dtype": torch.float16}, {"acc": "f16"}, "unqualified", "acc='f16'"),
        ({}, {"enable_fp8": False, "enable_fp4": True}, "unqualified", "FP4"),
    ],
)
def test_what_fp8_does_not_serve_says_so(changes, config, kind, words):
    answer = fp8.supports(call(**changes), CUDABackend(**{"enable_fp8": True, **config}))
    assert isinstance(answer, Refused) and answer.kind == kind and words in answer.reason


@pytest.mark.parametrize("mask_kind", ["none", "bool", "additive", "intervals"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256, 512])
def test_what_fp8_serves(head_dim, mask_kind):
    assert isinstance(fp8.supports(call(head_dim=head_dim, value_dim=head_dim, mask_kind=mask_kind)), Accepted)


def test_the_kernel_is_described_with_its_quantisation():
    text = fp8.describe(call(is_causal=True), CUDABackend(enable_fp8=True, smooth_v=True))
    assert "e4m3" in text and "keys and values" in text and "stay in the input dtype" in text
    text = fp8.describe(call(), CUDABackend(enable_fp8=True, smooth_k=False))
    assert "mean" not in text and "stay" not in text


def test_fp8_on_the_cpu_goes_to_sdpa_and_says_why():
    x = torch.randn(1, 2, 600, 64, dtype=torch.bfloat16)
    with settings.override(force_no_sdpa_fallback=False):
        made = explain(x, x, x, backend="cuda-fp8")
    assert made.forward == "sdpa" and "tensors on cpu" in str(made)


def test_early_causal_rows_are_kept_unless_told_otherwise():
    assert fp8.keeps_early_rows(CUDABackend(enable_fp8=True), True)
    assert fp8.keeps_early_rows(CUDABackend(enable_fp8=True, hybrid=True), True)
    assert not fp8.keeps_early_rows(CUDABackend(enable_fp8=True, hybrid=False), True)
    assert not fp8.keeps_early_rows(CUDABackend(enable_fp8=True, hybrid=True), False)


def test_hybrid_takes_the_first_tile_from_the_other_kernel(monkeypatch):
    """Without a GPU: what is launched on which rows."""
    seen = []

    def native(inputs, family):
        seen.append((family, tuple(inputs.query.shape), tuple(inputs.key.shape), inputs.is_causal))
        return inputs.query * 0 + 7, torch.full(inputs.query.shape[:3], 7.0), torch.empty(0)

    monkeypatch.setattr(launch, "forward", native)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(fp8_launch, "quantise", lambda *_: None)
    monkeypatch.setattr(fp8_launch, "attend", lambda *given: seen.append(given[6]))
    x = torch.zeros(1, 2, 300, 128, dtype=torch.bfloat16)
    out, lse, _ = fp8_launch.forward(AttentionInputs(x, x, x, scale=1.0, is_causal=True), hybrid=True)
    assert seen == [1, ("native", (1, 2, 128, 128), (1, 2, 128, 128), True)]
    assert (out[:, :, :128] == 7).all() and (lse[:, :, :128] == 7).all()
