"""Environment variables: read once, checked, and replaced inside `override`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from ffpa_hf import settings
from ffpa_hf.settings import VARIABLES, Settings, from_environment

SWITCHES = [(variable, field) for variable, field, _ in VARIABLES if isinstance(getattr(Settings(), field), bool)]


def test_an_empty_environment_gives_the_documented_defaults():
    assert from_environment({}) == Settings(
        cuda_allow_small_d=True,
        triton_allow_small_d=True,
        cute_allow_small_d=True,
        force_no_sdpa_fallback=False,
        allow_unqualified=False,
        default_backend=None,
        log="warning",
        cache_dir=None,
        triton_interpret=False,
    )


def test_every_setting_has_one_variable_with_a_description():
    assert sorted(field for _, field, _ in VARIABLES) == sorted(field.name for field in dataclasses.fields(Settings))
    assert len({variable for variable, _, _ in VARIABLES}) == len(VARIABLES)
    assert all(text.strip() for _, _, text in VARIABLES)


@pytest.mark.parametrize("variable, field", SWITCHES)
def test_switches_are_turned_both_ways(variable, field):
    for text in ("1", "true", "YES", " on "):
        assert getattr(from_environment({variable: text}), field) is True
    for text in ("0", "false", "No", "off", ""):
        assert getattr(from_environment({variable: text}), field) is False


@pytest.mark.parametrize("variable, field", SWITCHES)
def test_a_switch_that_is_neither_raises_and_names_itself(variable, field):
    with pytest.raises(ValueError, match=f"{variable}='maybe'.*1 or 0"):
        from_environment({variable: "maybe"})


@pytest.mark.parametrize("level", ["error", "warning", "debug"])
def test_log_levels(level):
    assert from_environment({"FFPA_LOG": level}).log == level
    assert from_environment({"FFPA_LOG": ""}).log == "warning"


def test_an_unknown_log_level_raises():
    with pytest.raises(ValueError, match="FFPA_LOG='loud'.*error, warning or debug"):
        from_environment({"FFPA_LOG": "loud"})


def test_texts_are_taken_as_they_are_and_empty_is_none():
    read = from_environment({"FFPA_DEFAULT_BACKEND": " triton ", "FFPA_CACHE_DIR": "/somewhere"})
    assert (read.default_backend, read.cache_dir) == ("triton", "/somewhere")
    assert from_environment({"FFPA_DEFAULT_BACKEND": ""}).default_backend is None


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.current().log = "debug"


def test_override_lasts_for_its_block_and_nests():
    before = settings.current()
    with settings.override(log="error") as outer:
        assert settings.current() is outer and outer.log == "error"
        with settings.override(allow_unqualified=True):
            assert settings.current().log == "error" and settings.current().allow_unqualified
        assert settings.current() is outer
    assert settings.current() is before


def test_override_ends_with_an_exception_too():
    before = settings.current()
    with pytest.raises(KeyError), settings.override(log="error"):
        raise KeyError
    assert settings.current() is before


def test_override_of_an_unknown_field_raises_and_changes_nothing():
    before = settings.current()
    with pytest.raises(TypeError), settings.override(loud=True):
        pass
    assert settings.current() is before


def test_the_environment_is_read_once_at_import():
    program = (
        "import os, ffpa_hf\n"
        "from ffpa_hf import settings\n"
        "assert settings.current().log == 'error' and settings.current().triton_allow_small_d is False\n"
        "os.environ['FFPA_LOG'] = 'debug'\n"
        "assert settings.current().log == 'error'\n"
    )
    environment = os.environ | {"FFPA_LOG": "error", "FFPA_TRITON_ALLOW_SMALL_D": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_a_misspelt_variable_stops_the_import_with_its_name():
    environment = os.environ | {"FFPA_FORCE_NO_SDPA_FALLBACK": "perhaps"}
    done = subprocess.run([sys.executable, "-c", "import ffpa_hf"], capture_output=True, text=True, env=environment)
    assert done.returncode != 0 and "FFPA_FORCE_NO_SDPA_FALLBACK='perhaps'" in done.stderr
