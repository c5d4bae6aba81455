"""The sweep over every model class of diffusers that computes attention, and that its record and page are current."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil

import pytest

pytest.importorskip("diffusers")

import diffusers  # noqa: E402
import sweep  # noqa: E402
from sweep_models import CASES, LEFT_OUT  # noqa: E402

RECORDED = json.loads(sweep.RECORD.read_text())
RECORDS = {(r["class"], r["variant"]): r for r in RECORDED["models"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()]
)
def test_a_model_computes_the_same_through_us_and_is_given_back(name):
    """One shared processor, diffusers' switch and enable(), each against the default; and as the record says."""
    case = CASES[name]
    assert sweep.examine(case) == RECORDS[case.class_name, case.variant], (
        "run tests/processors/sweep.py to renew the record"
    )


def test_the_record_the_page_and_the_installed_diffusers_agree():
    assert RECORDED["diffusers"] == diffusers.__version__
    assert sorted(RECORDS) == sorted((case.class_name, case.variant) for case in CASES.values())
    text = sweep.PAGE.read_text()
    assert sweep.page(text, RECORDED["models"]) == text, "run tests/processors/sweep.py to renew the table"


def test_ninety_classes_are_swept():
    assert len({case.class_name for case in CASES.values()}) >= 90


def test_no_model_class_of_diffusers_is_forgotten():
    """A release with a new one fails here: give it a case, or a reason in LEFT_OUT."""
    from diffusers.models.modeling_utils import LegacyModelMixin, ModelMixin

    found = set()
    for package in ("diffusers.models", "diffusers.pipelines"):
        for item in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if package.endswith("pipelines") and "pipeline_" in item.name:
                continue
            try:
                module = importlib.import_module(item.name)
            except (ImportError, RuntimeError):  # needs a package that is not installed
                continue
            for kind in vars(module).values():
                if inspect.isclass(kind) and issubclass(kind, ModelMixin) and kind.__module__ == module.__name__:
                    found.add(kind.__name__)
    found -= {ModelMixin.__name__, LegacyModelMixin.__name__}
    swept = {case.class_name for case in CASES.values()}
    assert len(found) > 150
    assert found - swept - set(LEFT_OUT) == set()
    assert (swept | set(LEFT_OUT)) - found == set(), "these are gone from diffusers"
    assert not swept & set(LEFT_OUT)
