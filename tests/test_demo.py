"""The demo: passes on sound code, fails on wrong numbers and on code that is never reached, and writes what it says."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ffpa_hf
from ffpa_hf import demo
from ffpa_hf.demo import evidence, finetune, interpreted, photo
from ffpa_hf.demo.finetune import Recipe, Run, Windows

for needed in ("accelerate", "diffusers", "matplotlib", "peft", "transformers"):
    pytest.importorskip(needed)

TINY = Recipe(
    hidden=32,
    intermediate=64,
    layers=2,
    global_every=2,
    heads=4,
    key_value_heads=2,
    sequence=48,
    window=16,
    batch=2,
    steps=3,
    learning_rate=1e-3,
    sliding_head_dim=64,
    global_head_dim=128,
)
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    """Accelerate keeps device and precision per process; another test may have chosen others, and may again."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _run(folder: Path, **more):
    from rich.console import Console

    printed = io.StringIO()
    options = {
        "photo_options": {"size": 64, "channels": (32, 64)},
        "finetune_options": {"recipe": TINY},
        "console": Console(file=printed, width=100),
        **more,
    }
    return demo.run(folder, "cpu", **options), printed.getvalue()


@pytest.fixture
def without_interpreted(monkeypatch):
    monkeypatch.setattr("ffpa_hf.demo.interpreted.run_interpreted", lambda: ([], ""))


def test_everything_agrees_and_the_report_is_written(tmp_path):
    code, printed = _run(tmp_path / "made" / "here")
    assert code == 0, printed
    folder = tmp_path / "made" / "here"
    for name in ("photo.png", "losses.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    page = (folder / "index.html").read_text(encoding="utf-8")
    for shown in (
        "photo.png",
        "losses.png",
        "mid_block.attentions.0",
        "model.layers.1.self_attn",
        "no kernel for tensors",
    ):
        assert shown in page
    assert "FAILED" not in page and "checks passed" in page
    assert "Triton kernels in the interpreter: query gradient" in page
    assert "model.layers.0.self_attn" in printed and "index.html" in printed


@pytest.mark.usefixtures("without_interpreted")
def test_slightly_wrong_language_model_attention_fails_it(tmp_path, monkeypatch):
    from transformers import AttentionInterface

    right = AttentionInterface._global_mapping["ffpa"]

    def wrong(*given, **more):
        return right(*given, **{**more, "scaling": 1.05})  # 1.0 is right for Gemma 4

    monkeypatch.setitem(AttentionInterface._global_mapping, "ffpa", wrong)
    code, printed = _run(tmp_path)
    assert code == 1
    assert "FAILED Gemma 4: first-step gradient" in printed
    assert "FAILED Gemma 4: loss curve" in printed
    assert "failed.</strong>" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("without_interpreted")
def test_slightly_wrong_autoencoder_attention_fails_it(tmp_path, monkeypatch):
    import ffpa_hf.processors.redirect as redirect

    right = redirect.attend
    monkeypatch.setattr(redirect, "attend", lambda *given, **more: right(*given, **more) * 1.01)
    code, printed = _run(tmp_path)
    assert code == 1
    assert "FAILED VAE: decoded picture" in printed


@pytest.mark.usefixtures("without_interpreted")
def test_a_processor_that_ffpa_hf_never_sees_fails_it(tmp_path, monkeypatch):
    from diffusers.models.attention_processor import AttnProcessor2_0

    monkeypatch.setattr(ffpa_hf, "FFPAAttnProcessor", AttnProcessor2_0)
    code, printed = _run(tmp_path)
    assert code == 1
    assert "FAILED VAE: every attention call" in printed


def test_kernels_that_do_not_run_fail_it(monkeypatch):
    real = subprocess.run

    def broken(command, **more):
        return real([command[0], "-c", "raise RuntimeError('no kernel here')"], **more)

    monkeypatch.setattr(interpreted.subprocess, "run", broken)
    checks, text = interpreted.run_interpreted()
    assert [check.passed for check in checks] == [False]
    assert "no kernel here" in checks[0].measured and text == ""


@pytest.mark.gpu
def test_on_a_gpu_kernels_serve_the_512_wide_heads():
    parts = (photo.run_photo(torch.device("cuda")), finetune.run_finetune(torch.device("cuda"), steps=10))
    for part in parts:
        assert not [check for check in part.checks if not check.passed]
        wide = [site for site in part.sites if "D512" in site.shape]
        assert wide and all(site.backend != "sdpa" and site.ffpa_ms > 0 for site in wide)


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    code, printed = _run(tmp_path)
    assert code == 2
    assert "diffusers" in printed and "ffpa-hf[demo]" in printed


@pytest.mark.parametrize(
    ("device", "steps"), [("mps", None), ("meta", None), ("toaster", None), ("cpu", 0), ("cpu", -1)]
)
def test_impossible_requests_are_refused(tmp_path, device, steps):
    assert demo.run(tmp_path, device, steps) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the GPU that is not there")
def test_a_gpu_that_is_not_there_is_refused(tmp_path, capsys):
    assert demo.run(tmp_path, "cuda") == 2
    assert "cuda" in capsys.readouterr().out


def test_nan_passes_no_limit():
    nan = torch.full((1, 3, 2, 2), float("nan"))
    assert photo._relative(nan, torch.ones(1, 3, 2, 2)) == float("inf")
    runs = {name: Run(name, [2.0, 1.5, 1.2]) for name in finetune.IMPLEMENTATIONS}
    assert finetune._curve_check(runs, torch.float32)[0].passed
    runs["ffpa"].losses[1] = float("nan")
    check, _ = finetune._curve_check(runs, torch.float32)
    assert not check.passed and "step 2" in check.name


def test_a_curve_may_drift_as_eager_does_and_not_more():
    runs = {"sdpa": Run("sdpa", [2.0] * 3), "eager": Run("eager", [2.0, 2.001, 2.0])}
    for last, passed in ((2.003, True), (2.005, False)):
        runs["ffpa"] = Run("ffpa", [2.0, 2.0, last])
        assert finetune._curve_check(runs, torch.float32)[0].passed is passed
    runs["ffpa"] = Run("ffpa", [2.003, 2.0, 2.0])  # before eager drifted there was no such allowance
    assert not finetune._curve_check(runs, torch.float32)[0].passed


def test_a_run_that_learns_nothing_fails():
    assert not finetune._learning_check(Run("ffpa", [5.0] * 20)).passed
    assert finetune._learning_check(Run("ffpa", [5.0] * 10 + [3.0] * 10)).passed


def test_every_model_layer_kind_of_gemma_4_is_in_the_demo():
    for recipe in (finetune.ON_CPU, finetune.ON_GPU):
        assert (recipe.sliding_head_dim, recipe.global_head_dim) == (256, 512)
        assert recipe.heads % recipe.key_value_heads == 0 and recipe.heads > recipe.key_value_heads
        assert recipe.window < recipe.sequence and 1 < recipe.global_every <= recipe.layers


def test_the_autoencoder_is_full_size():
    with torch.device("meta"):
        vae = photo.build_autoencoder()
    assert sum(parameter.numel() for parameter in vae.parameters()) == 83_653_863
    attention = vae.get_submodule("encoder.mid_block.attentions.0")
    assert (attention.heads, attention.to_q.out_features) == (1, 512)


def test_photograph_is_square_and_in_range():
    picture = photo.load_photograph(48)
    assert picture.shape == (1, 3, 48, 48) and picture.dtype == torch.float32
    assert -1 <= picture.min() < -0.5 and 0.5 < picture.max() <= 1


def test_windows_are_the_text_and_the_same_for_every_run():
    text = finetune.read_text()
    assert len(text) > 100_000 and text.isascii() and b"Alice" in text
    one, other = (Windows(text, 32, 5, seed=3) for _ in range(2))
    assert len(one) == 5
    for i in range(5):
        assert torch.equal(one[i], other[i])
        assert bytes(one[i].tolist()) in text


def test_clock_counts_calls_and_leaves_no_hook_behind():
    layer = torch.nn.Linear(4, 4)
    with evidence.SiteClock([("layer", layer)], CPU) as clock:
        for _ in range(3):
            layer(torch.zeros(1, 4))
    layer(torch.zeros(1, 4))
    assert clock.calls("layer") == 3 and clock.median_ms("layer") > 0
    assert not layer._forward_hooks and not layer._forward_pre_hooks
