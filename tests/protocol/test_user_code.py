"""Where an exception of the user's code comes from, and modules that cannot be imported."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import SettingsError
from protocol.user_code import call, import_attribute, located, returned_number
from rollout.tools.calculator import calculate


def test_the_place_of_an_exception_is_in_the_users_code() -> None:
    with pytest.raises(TypeError) as raised:
        calculate(None)  # type: ignore[arg-type]
    text = located(raised.value)
    assert text.startswith(f"{__file__}:")
    assert text.endswith("TypeError: object of type 'NoneType' has no len()")


def test_the_first_of_several_exceptions_is_named() -> None:
    error = ExceptionGroup("several", [ExceptionGroup("inner", [KeyError("a")]), ValueError("b")])
    assert located(error) == "KeyError: 'a'"
    assert located(asyncio.CancelledError()) == "CancelledError"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(:", r"broken\.py:1: SyntaxError"),
        ("import no_such_module_at_all", r"broken\.py:1: ModuleNotFoundError: No module named 'no_such"),
        ("1 / 0", r"broken\.py:1: ZeroDivisionError"),
        ("import sys\nsys.exit()", r"broken\.py:2: SystemExit"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('x')\np.parse_args([])",
            r"broken\.py:4: SystemExit: 2",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=rf"setting x: {tmp_path}/{why}"):
        import_attribute("broken:f", "setting x")


def test_a_missing_module_names_the_users_directories_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = [
        str(Path(sys.executable).parent),
        "__editable__.tether_rl.finder.__path_hook__",
        next(path for path in sys.path if path.endswith("site-packages")),
    ]
    for given, searched in (([str(tmp_path)] * 2, str(tmp_path)), ([], "any directory")):
        monkeypatch.setattr(sys, "path", [*environment, *given])
        with pytest.raises(SettingsError) as refused:
            import_attribute("nowhere:f", "setting x")
        assert str(refused.value).startswith(f"setting x: there is no nowhere.py in {searched}; ")


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5, dtype=torch.bfloat16)]
)
def test_a_scalar_of_a_library_is_a_number(value: Any) -> None:
    assert returned_number(value) == 0.5
    assert type(returned_number(np.int64(3))) is float
    assert returned_number(np.bool_(True)) == 1.0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.float32("nan"), "nan"),
        (np.ones(1), "ndarray"),
        (torch.ones(1), "Tensor"),
        (np.complex64(1), "complex"),
    ],
)
def test_a_value_of_numpy_that_is_no_finite_number_is_refused(value: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        returned_number(value)


def refuses(count: int, *, least: int = 0) -> int:
    if count < least:
        raise ValueError(f"{count} is too small")
    return count


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"leest": 1}, r"^it: got an unexpected keyword argument 'leest'; it is called with a count$"),
        ({"least": 5}, rf"^it: {re.escape(__file__)}:\d+: ValueError: 3 is too small$"),
    ],
)
def test_call_names_what_a_users_function_is_called_with_and_where_it_raises(
    options: dict[str, int], text: str
) -> None:
    assert call("it", refuses, "a count", (3,), {"least": 1}) == 3
    with pytest.raises(SettingsError, match=text):
        call("it", refuses, "a count", (3,), options)
