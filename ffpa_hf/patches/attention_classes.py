"""Models of transformers that look their attention class up by the implementation's name: they get to know "ffpa".

Their attention never goes through transformers' interface. Without an entry of that name a whole model could not be
loaded because one tower in it is of this kind; with it, such layers stay what they would have been, and say so. Imports
no transformers and nothing heavy: it runs with `import ffpa_hf`, and reaches transformers' modules as they load.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import wrapt
from torch.nn import Module

from ffpa_hf import settings
from ffpa_hf.report import not_accelerated

#: The name users write; it must not contain "flash", "/" or "|", which transformers treats as kernel names.
NAME = "ffpa"

#: Modeling module, below `transformers.models` -> its table from an implementation's name to an attention class.
TABLES = {
    "bark.modeling_bark": "BARK_ATTENTION_CLASSES",
    "data2vec.modeling_data2vec_vision": "DATA2VEC_VISION_SELF_ATTENTION_CLASSES",
    "deepseek_ocr2.modeling_deepseek_ocr2": "DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES",
    "falcon.modeling_falcon": "FALCON_ATTENTION_CLASSES",
    "git.modeling_git": "GIT_SELF_ATTENTION_CLASSES",
    "gpt_neo.modeling_gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "gptj.modeling_gptj": "GPTJ_ATTENTION_CLASSES",
    "sam.modeling_sam": "SAM_VISION_ATTENTION_CLASSES",
    "sam_hq.modeling_sam_hq": "SAM_HQ_VISION_ATTENTION_CLASSES",
    "superglue.modeling_superglue": "SUPERGLUE_SELF_ATTENTION_CLASSES",
    "unlimited_ocr.modeling_unlimited_ocr": "UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES",
}
_hooked = False
_offered = False


def hook() -> None:
    """Offer the entry in each of these modules that loads from now on, while `offer` is in force. Idempotent."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    for path, table in TABLES.items():
        module = f"transformers.models.{path}"
        if module not in sys.modules:  # else `offer` reaches it
            wrapt.register_post_import_hook(functools.partial(_on_import, table), module)


def offer() -> None:
    """Put the entry into every table that is loaded."""
    global _offered
    _offered = True
    for path, table in TABLES.items():
        _offer_in(table, sys.modules.get(f"transformers.models.{path}"))


def withdraw() -> None:
    """Take the entries out again."""
    global _offered
    _offered = False
    for path, table in TABLES.items():
        classes = getattr(sys.modules.get(f"transformers.models.{path}"), table, None)
        if isinstance(classes, dict) and isinstance(classes.get(NAME), _Native):
            del classes[NAME]


def _on_import(table: str, module: Any) -> None:
    if _offered:
        _offer_in(table, module)


def _offer_in(table: str, module: Any) -> None:
    classes = getattr(module, table, None)  # absent in another release, or in a module that is still loading
    own = classes.get("sdpa", classes.get("eager")) if isinstance(classes, dict) else None
    if own is not None and NAME not in classes:
        classes[NAME] = _Native(own)


class _Native:
    """Makes a model's own attention layer where "ffpa" was asked for, and says so once for each class."""

    def __init__(self, own: type[Module]) -> None:
        self.own = own
        self.said = False

    def __call__(self, *arguments: Any, **options: Any) -> Module:
        if not self.said and not settings.silenced():
            self.said = True
            warnings.warn(
                f"ffpa_hf: {self.own.__name__} computes its attention itself, not through transformers' attention "
                f'interface; it stays as it is under attn_implementation="{NAME}".',
                stacklevel=3,
            )
        layer = self.own(*arguments, **options)
        not_accelerated(layer, "computes its attention itself, not through transformers' interface")
        return layer
