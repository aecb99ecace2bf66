"""Rules of imports, on small repositories that break them."""

from collections.abc import Callable

import pytest

from tests.house import imports
from tests.house.source import House

Build = Callable[[dict[str, str]], House]


def test_sibling_below_type_checking_is_found(build: Build) -> None:
    guarded = "if TYPE_CHECKING:\n    from {} import A\n"
    house = build(
        {
            "rollout/one/a.py": "class A: ...\n",
            "rollout/one/b.py": guarded.format("rollout.one.a"),
            "rollout/one/c.py": guarded.replace("TYPE", "typing.TYPE").format("rollout.one.a"),
            "rollout/two/d.py": guarded.format("rollout.one.a"),
            "rollout/one/e.py": "from rollout.one.a import A\n",
        }
    )
    found = [(violation.path, violation.line) for violation in imports.sibling_type_checking(house)]
    assert found == [("rollout/one/b.py", 2), ("rollout/one/c.py", 2)]


def test_import_cycle_through_a_function_is_found(build: Build) -> None:
    house = build(
        {
            "reward/a.py": "from reward import b\n",
            "reward/b.py": "import reward.c\n",
            "reward/c.py": "def f():\n    from reward.a import x\n",
            "reward/d.py": "from reward import a\n",
        }
    )
    (violation,) = imports.import_cycle(house)
    assert str(violation) == "reward/a.py:1 import-cycle: import each other: reward.a, reward.b, reward.c"


@pytest.mark.parametrize(
    "call",
    [
        "import importlib\nimportlib.import_module('reward.b').make()\n",
        "from importlib import import_module\nimport_module('reward.b')\n",
    ],
)
def test_import_cycle_through_import_module_is_found(build: Build, call: str) -> None:
    house = build({"reward/a.py": call, "reward/b.py": "from reward import a\n"})
    (violation,) = imports.import_cycle(house)
    assert str(violation) == "reward/a.py:1 import-cycle: import each other: reward.a, reward.b"


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("services/trainer/a.py", "from services.rollout import serve", "do not import each other's process"),
        ("services/cli.py", "import services.rollout", "do not import each other's process"),
        ("tests/integration/a.py", "from services.rollout.service import serve", "is `serve`"),
        ("tests/integration/a.py", "from services.rollout import service", "is `serve`"),
        ("tests/integration/a.py", "from services.rollout import other", "is `serve`"),
        ("tests/integration/a.py", "from services.rollout import serve", None),
        ("tests/integration/a.py", "from services import rollout", None),
        ("tests/services/rollout/test_service.py", "from services.rollout.service import serve", None),
        ("services/rollout/other.py", "from services.rollout.service import serve", None),
    ],
)
def test_process_is_imported_by_its_door(build: Build, path: str, line: str, message: str | None) -> None:
    door = "from services.rollout.service import serve\n"
    house = build(
        {
            "services/rollout/__init__.py": door,
            "services/rollout/service.py": "serve = other = 1\n",
            path: f"{line}\n",
        }
    )
    found = [violation.message for violation in imports.process_door(house) if violation.path == path]
    assert len(found) == (1 if message else 0)
    assert all(message in text for text in found if message)
