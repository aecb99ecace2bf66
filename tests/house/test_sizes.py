"""Rules of size, on small repositories that break them."""

from collections.abc import Callable, Iterable

import pytest

from tests.house import sizes
from tests.house.source import House, Violation

Build = Callable[[dict[str, str]], House]
LONG = "x = 1\n" * 50


def found(violations: Iterable[Violation]) -> list[str]:
    return sorted(map(str, violations))


def test_folder_with_fifteen_modules_is_too_full(build: Build) -> None:
    files = {f"reward/m{number}.py": "" for number in range(14)}
    files |= {"reward/__init__.py": "", "reward/__main__.py": ""}
    assert found(sizes.folder_size(build(files))) == []
    files |= {"reward/m14.py": ""}
    assert found(sizes.folder_size(build(files))) == ["reward:1 folder-size: 15 modules, at most 14"]


def test_services_top_has_only_what_is_started(build: Build) -> None:
    house = build({"services/cli.py": "", "services/turns.py": "", "services/bus/pump.py": ""})
    assert [violation.path for violation in sizes.services_top(house)] == ["services/turns.py"]


def test_module_of_401_lines_is_too_long(build: Build) -> None:
    house = build({"rollout/a.py": "x = 1\n" * 400, "rollout/b.py": "x = 1\n" * 401})
    assert found(sizes.module_length(house)) == ["rollout/b.py:1 module-length: 401 lines, at most 400"]


@pytest.mark.parametrize(("folder", "limit"), [("trainer", 50), ("tests", 80)])
def test_function_length_is_limited_by_folder(build: Build, folder: str, limit: int) -> None:
    line = "    x = 1\n"
    text = f"def fits():\n{line * (limit - 1)}\nasync def longer():\n{line * limit}"
    expected = f"{folder}/a.py:{limit + 2} function-length: longer has {limit + 1} lines, at most {limit}"
    assert found(sizes.function_length(build({f"{folder}/a.py": text}))) == [expected]


def test_short_module_with_one_importer_is_found(build: Build) -> None:
    files = {"trainer/a.py": "def f(): ...\n", "trainer/b.py": "from trainer.a import f\n" + LONG}
    house = build(files)
    assert [violation.path for violation in sizes.short_module(house, {})] == ["trainer/a.py"]
    assert found(sizes.short_module(house, {"trainer.a": "a reason"})) == []
    house = build({"trainer/c.py": "from trainer import a\n" + LONG})
    assert found(sizes.short_module(house, {})) == []


def test_short_module_exception_must_be_needed(build: Build) -> None:
    (violation,) = sizes.short_module(build({}), {"trainer.a": "a reason"})
    assert violation.message == "the exception trainer.a is not needed"


@pytest.mark.parametrize(
    "text",
    [
        "class A(Protocol): ...\n",
        '"""Sizes."""\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n    x: int\n',
        "class A(Message, tag='a'):\n    x: int\n",
    ],
)
def test_short_interface_may_have_one_importer(build: Build, text: str) -> None:
    assert found(sizes.short_module(build({"trainer/a.py": text}), {})) == []


def test_short_implementation_is_named_by_its_registry(build: Build) -> None:
    registry = "from reward.verifiers.a import f\nNAMES = 'b', 'reward.verifiers.c:f'\n"
    files = {
        "reward/verifiers/registry.py": registry,
        **{f"reward/verifiers/{name}.py": "def f(): ...\n" for name in "abcd"},
    }
    assert [violation.path for violation in sizes.short_module(build(files), {})] == ["reward/verifiers/d.py"]
