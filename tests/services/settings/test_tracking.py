"""Tests section [tracking]: how its kinds are given, and which are refused."""

import sys
from typing import Any, get_args

import pytest

from protocol.errors import SettingsError
from services.settings.load import load_settings
from services.settings.tracking import Kind, missing_libraries
from services.tracking.registry import TRACKERS


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("tracking.kind=wandb", ("wandb",)),
        ('tracking.kind="wandb"', ("wandb",)),
        ("tracking.kind=['wandb', 'mlflow']", ("wandb", "mlflow")),
        ("tracking.kind=[]", ()),
        ('tracking.kind=""', ()),
    ],
)
def test_kinds_are_a_list_or_one_string(given: str, kinds: tuple[str, ...]) -> None:
    assert load_settings(None, [given], {}).tracking.kind == kinds


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "tracking.kind=['wandb', 'tensorbord']",
            "setting tracking.kind.1: .* did you mean 'tensorboard'",
        ),
        ("tracking.kind=['wandb', 'wandb']", "setting tracking.kind: a kind is given twice"),
        ("tracking.kind=7", "setting tracking.kind"),
        ("tracking.flush_s=-1", "setting tracking.flush_s"),
    ],
)
def test_kinds_that_do_not_exist_are_refused(given: str, says: str) -> None:
    with pytest.raises(SettingsError, match=f"^{says}"):
        load_settings(None, [given], {})


def test_kinds_whose_library_is_missing_are_found_without_importing_any(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = load_settings(None, ["tracking.kind=['tensorboard', 'wandb']"], {}).tracking
    assert missing_libraries(config) == ["wandb"]
    assert set(get_args(Kind)) == set(TRACKERS)
