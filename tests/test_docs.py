"""The documentation is true: snippets run, commands exist, messages are the ones raised, made parts are up to date."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ffpa_hf
from ffpa_hf import FallbackWarning, dispatch, ffpa_attn_func, settings
from ffpa_hf.call import AttentionCall

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
sys.path.insert(0, str(ROOT / "tests" / "patches"))
sys.path.insert(0, str(ROOT / "scripts"))
make_docs = importlib.import_module("make_docs")


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


# --- snippets ---------------------------------------------------------------------------------------------------------


class Given:
    """What a snippet may use without making it: a tiny instance of each, made where a name is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def name(self) -> str:
        """A saved causal language model with the head dims and layers of Gemma 4's kind."""
        tiny = importlib.import_module("tiny_transformers")
        tiny.model("gemma4").save_pretrained(self._folder / "model")
        return str(self._folder / "model")

    def model(self) -> Any:
        return importlib.import_module("tiny_transformers").model("gemma4", "ffpa")

    def inputs(self) -> dict[str, Any]:
        return importlib.import_module("tiny_transformers").batch("left")

    def tokens(self) -> torch.Tensor:
        return torch.randint(2, 60, (2, 12))

    def pipe(self) -> Any:
        made = importlib.import_module("tiny_pipeline").build()
        made.transformer = made.unet  # README speaks of models of either kind
        return made

    def prompt(self) -> dict[str, Any]:
        """Arguments of a call of the tiny pipeline, which has no tokenizer."""
        embeddings = torch.randn(1, 7, 32)
        return {
            "prompt_embeds": embeddings,
            "negative_prompt_embeds": embeddings,
            "num_inference_steps": 1,
            "height": 16,
            "width": 16,
            "output_type": "pt",
        }

    def query(self) -> torch.Tensor:
        return torch.randn(1, 4, 64, 128)

    key = value = query

    def torch(self) -> Any:
        return torch

    def ffpa_hf(self) -> Any:
        return ffpa_hf

    def AutoModelForCausalLM(self) -> Any:
        return importlib.import_module("transformers").AutoModelForCausalLM


def free_names(code: str) -> list[str]:
    """Names that a snippet reads, in order."""
    return [node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]


WITH_SNIPPETS = [page for page in PAGES if fenced(page, "python")]


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.stem)
def test_snippets_run_one_after_the_other(page, tmp_path, no_interpreter, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")
    given, names = Given(tmp_path), {}
    for code in fenced(page, "python"):
        for name in free_names(code):
            if name not in names and hasattr(given, name):
                names[name] = getattr(given, name)()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)  # a page must not lead its reader into one
            exec(compile(code, str(page), "exec"), names)


def test_there_are_snippets_and_every_block_names_its_language():
    assert len(WITH_SNIPPETS) >= 8
    for page in PAGES:
        opened = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(opened[::2]) <= {"python", "console", "text"} and set(opened[1::2]) <= {""}, page.name


# --- commands ---------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for block in fenced(page, "console"):
            for line in block.splitlines():
                if line.startswith("$ "):
                    found.append((page.stem, shlex.split(line[2:], comments=True)))
    return found


def test_every_command_exists_with_its_options():
    import typer

    from ffpa_hf.cli import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    seen = set()
    for page, words in commands():
        seen.add(words[0])
        if words[0] == "ffpa-hf":
            options = {flag for each in known[words[1]].params for flag in (*each.opts, *each.secondary_opts)}
            script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)  # record's own come first
            given = {word for word in words[2:script] if word.startswith("-")}
            assert given <= options, f"{page}: {' '.join(words)}"
        elif words[0] == "make":
            assert words[1] in targets, f"{page}: {' '.join(words)}"
        elif words[0] == "pip":
            for named in re.findall(r"\[([\w,]+)\]", " ".join(words)):
                assert set(named.split(",")) <= extras, f"{page}: {' '.join(words)}"
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]) is not None, f"{page}: {' '.join(words)}"
        else:
            script = words[1] if words[0] == "python" else words[0]
            assert words[0] == "accelerate" or (ROOT / script).is_file(), f"{page}: {' '.join(words)}"
    assert {"ffpa-hf", "make", "pip"} <= seen


# --- made parts and the site ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_made_parts_are_what_the_code_and_the_results_say(page):
    text = page.read_text(encoding="utf-8")
    assert make_docs.filled(text) == text, "python scripts/make_docs.py renews it"


def test_every_part_is_on_a_page_and_an_unknown_one_is_noticed():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"^<!-- made: (\S+) -->$", text, flags=re.MULTILINE)) == set(make_docs.PARTS)
    assert len(make_docs.PARTS) == len(re.findall(r"^<!-- /made -->$", text, flags=re.MULTILINE))
    with pytest.raises(KeyError):
        make_docs.filled("<!-- made: nothing -->\n<!-- /made -->")


def test_the_table_of_features_tells_yes_from_no():
    """Against answers that are known here, so that a table of empty promises would fail."""
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in make_docs.capabilities().splitlines()[2:]}
    sdpa, triton, backward, native, tma = range(5)
    assert rows["float32"][sdpa] == "yes" and rows["float32"][triton] == "raises"
    assert rows["`softcap`"][:4] == ["plain torch", "yes", "yes", "raises"]
    assert rows["dropout"][native] == "yes" and rows["dropout"][tma] == "raises"
    assert rows["value of another width than query"][backward] == "SDPA instead"
    assert rows["head dims"][:2] == ["any", "64 to 1024, multiples of 8"]


def test_environment_page_has_every_variable_and_no_other():
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([A-Z][A-Z_]+)`", page, flags=re.MULTILINE))
    assert named == {variable for variable, _, _ in settings.VARIABLES}


def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material comes with the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Quick start" in home and 'href="../examples' not in home  # links out of the site became paths
    for page in DOCS.glob("*.md"):
        assert (tmp_path / ("" if page.stem == "index" else page.stem) / "index.html").exists()
        assert page.stem == "index" or f'href="{page.stem}/"' in home, f"{page.name} is not in the navigation"


def test_a_link_to_nothing_fails_the_site(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material comes with the extra `docs`")
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for number, link in enumerate(("[a](nowhere.md)", "[a](masks.md#nowhere)", "[a](../nowhere.py)")):
        page = tmp_path / "docs" / "cute.md"
        page.write_text(f"# CuTe-DSL\n\n{link}\n", encoding="utf-8")
        (tmp_path / "docs" / "index.md").write_text("# Quick start\n", encoding="utf-8")
        for other in (tmp_path / "docs").glob("*.md"):
            if other.stem not in ("cute", "masks", "index"):
                other.write_text(f"# {other.stem}\n", encoding="utf-8")
        (tmp_path / "docs" / "masks.md").write_text("# Masks\n", encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / f"site{number}")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0 and "nowhere" in done.stdout + done.stderr, link


# --- messages ---------------------------------------------------------------------------------------------------------


def messages() -> list[str]:
    """The headings of the troubleshooting page that are messages."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^### `(.*)`$", text, flags=re.MULTILINE)


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".+?".join(map(re.escape, message.split("…"))), re.DOTALL)


def literals() -> str:
    """Every string of the package's sources, with `…` where a value goes in."""
    found = []
    for path in (ROOT / "ffpa_hf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    # templates of `refuse` have {} where a value goes in; the name is ours in the attention interface
    return re.sub("…+", "…", re.sub(r"\{[^{}]*\}", "…", "\n".join(found))).replace('"…"', '"ffpa"')


def test_every_message_of_the_page_is_raised_below_or_in_the_sources():
    text = literals()
    for message in messages():
        assert message in PROVOKED or message.removeprefix("… ").removesuffix(" …") in text, message
    assert len(messages()) > 30


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs here: on the CPU, in its interpreter
H200 = AttentionCall(1, 8, 8, 1024, 1024, 512, 512, torch.bfloat16, capability=(9, 0), device_name="NVIDIA H200")


def qkv(length: int = 600, head_dim: int = 64, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.zeros(1, 2, length, head_dim, dtype=dtype, device=DEVICE) for _ in range(3)]


def call(*, backend: str | None = None, tensors: list[torch.Tensor] | None = None, **arguments: Any) -> Any:
    return ffpa_attn_func(*(tensors or qkv()), backend=backend, **arguments)


def planned(described: AttentionCall, **wishes: str) -> None:
    made = dispatch.plan(described, dispatch.Route(**wishes, strict=True))
    raise made.error or AssertionError(str(made))


def second_derivative() -> None:
    tensors = [t.requires_grad_() for t in qkv(16)]
    with settings.override(force_no_sdpa_fallback=True):
        (grad,) = torch.autograd.grad(call(backend="triton", tensors=tensors).sum(), tensors[0], create_graph=True)
    torch.autograd.grad(grad.sum(), tensors[0])


def without_interpreter(run: Callable[[], Any]) -> Callable[[], Any]:
    def wrapped() -> None:
        with settings.override(triton_interpret=False):
            run()

    return wrapped


def of_query(**changes: Any) -> list[torch.Tensor]:
    query, key, value = qkv()
    return [query.to(**changes), key, value]


#: message -> (what raises or warns it, of which kind)
PROVOKED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "tensors on …: the … backend needs a CUDA or ROCm GPU": (
        without_interpreter(lambda: call(backend="triton", tensors=[each.cpu() for each in qkv()])),
        FallbackWarning,
    ),
    "a short sequence: kernels start at … queries and keys": (
        lambda: call(backend="triton", tensors=qkv(100)),
        FallbackWarning,
    ),
    "head_dim …: the … backend takes multiples of …, … to …": (
        lambda: call(backend="triton", tensors=qkv(600, 60)),
        FallbackWarning,
    ),
    "value is … wide and query …: the … backend needs one": (
        lambda: call(backend="triton", tensors=[*qkv()[:2], qkv(600, 128)[2]]),
        FallbackWarning,
    ),
    "query dtype …: the … backend takes …": (
        lambda: call(backend="triton", tensors=qkv(dtype=torch.float64)),
        TypeError,
    ),
    "query is …, key …, value …; one dtype is needed": (lambda: call(tensors=of_query(dtype=torch.float32)), TypeError),
    "query is on …, key on …, value on …; one device is needed": (
        lambda: call(tensors=of_query(device="meta")),
        ValueError,
    ),
    "unequal heads need enable_gqa=True": (
        lambda: call(tensors=[qkv()[0].repeat(1, 2, 1, 1), *qkv()[1:]]),
        ValueError,
    ),
    "attn_mask and is_causal=True were both given": (
        lambda: call(attn_mask=torch.ones(600, 600, dtype=torch.bool, device=DEVICE), is_causal=True),
        ValueError,
    ),
    "attn_mask has shape …; it must broadcast to … [B, Hq, Nq, Nkv]": (
        lambda: call(attn_mask=torch.ones(3, 600, dtype=torch.bool, device=DEVICE)),
        ValueError,
    ),
    "attn_mask is … beside … inputs; an additive mask may be …": (
        lambda: call(attn_mask=torch.zeros(600, 600, dtype=torch.float64, device=DEVICE)),
        TypeError,
    ),
    "softcap=…: the … backend has none": (lambda: call(backend="cuda", softcap=30.0), NotImplementedError),
    "… of the CuTe-DSL backend is not built yet": (
        lambda: planned(dataclasses.replace(H200, softcap=30.0), backend="cute"),
        NotImplementedError,
    ),
    "forward_backend=… cannot pair with backward_backend=…": (
        lambda: planned(H200, forward_backend="sdpa", backward_backend="triton"),
        ValueError,
    ),
    "the CUDA backend has no backward": (lambda: call(backward_backend="cuda"), ValueError),
    "ffpa_hf has no second derivative of attention": (second_derivative, NotImplementedError),
    "… is not a switch: use 1 or 0": (
        lambda: settings.from_environment({"FFPA_ALLOW_UNQUALIFIED": "perhaps"}),
        ValueError,
    ),
    "… is neither a transformers model nor a diffusers model or pipeline": (
        lambda: ffpa_hf.enable(torch.nn.Linear(2, 2)),  # type: ignore[arg-type]
        TypeError,
    ),
}


@pytest.mark.parametrize("message", PROVOKED)
def test_messages_are_raised_as_the_page_has_them(message):
    assert message in messages()
    provoke, kind = PROVOKED[message]
    with pytest.warns(kind) if issubclass(kind, Warning) else pytest.raises(kind) as caught:
        provoke()
    texts = [str(each.message) for each in caught] if issubclass(kind, Warning) else [str(caught.value)]
    assert any(pattern(message).search(text) for text in texts), texts


def test_unqualified_kernels_name_the_selftest():
    made = AttentionCall(**{**vars(H200), "is_rocm": True, "device_name": "MI300X", "capability": (9, 4)})
    assert "the … kernels are not qualified here" in messages()
    with settings.override(allow_unqualified=False), pytest.raises(RuntimeError, match="not qualified here.*selftest"):
        planned(made, backend="triton")


def test_nothing_is_said_under_ffpa_log_error(tmp_path):
    """In a process of its own: a fallback, a model without our interface, weights asked for, an unsafe cache folder."""
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    program = """
import sys, torch, transformers, diffusers, ffpa_hf
from ffpa_hf.kernels import compile_cache
q = torch.zeros(1, 2, 600, 64)
ffpa_hf.ffpa_attn_func(q.half(), q.half(), q.half(), backend="triton")
sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, pad_token_id=0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ffpa")
model(torch.ones(1, 4, dtype=torch.long), output_attentions=True)
net = diffusers.UNet2DModel(
    sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
    down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, add_attention=False,
)
net.set_attention_backend("ffpa")  # does nothing, and says so
import pathlib
folder = pathlib.Path(sys.argv[1]); folder.chmod(0o777)
assert compile_cache.get("key", lambda: b"kernel", folder) == b"kernel"
"""
    said = {}
    for level in ("error", "warning"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            env={
                **os.environ,
                "FFPA_LOG": level,
                "TRITON_INTERPRET": "0",
                "CUDA_VISIBLE_DEVICES": "",
                "TQDM_DISABLE": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said[level] = done.stderr
    for text in ("SDPA runs instead of triton", "output_attentions", "set_attention_backend", "is not used to keep"):
        assert text in said["warning"] and text not in said["error"], text
