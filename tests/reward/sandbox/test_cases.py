"""Tests how code is judged: by tests inside, and by plain values outside of the sandbox."""

from typing import Any

import pytest

from protocol.errors import RewardError
from reward.sandbox.cases import CallCase, judge, read_cases
from reward.sandbox.runner import Limits

LIMITS = Limits(wall_s=20.0, cpu_s=1, memory_mb=256, file_mb=1, processes=4, output_kb=64)


def passed(code: str, *tests: Any, tolerance: float = 1e-9) -> int:
    return judge(code, read_cases(list(tests), "tests"), LIMITS, tolerance)[0]


def call(returns: Any, *args: Any, name: str = "f", **kwargs: Any) -> dict[str, Any]:
    return {"call": name, "args": list(args), "kwargs": kwargs, "returns": returns}


def test_calls_are_compared_as_plain_values() -> None:
    identity = "def f(x): return x\nclass Solution:\n    def f(self, x, y=1): return x + y"
    expected = [
        *((value, value) for value in (None, True, 3, 10**30, 0.5, "ä\ud800", [1, [2]], {"a": [1.0]})),
        ([1, 2], [1, 2]),
    ]
    assert passed(identity, *(call(returns, given) for returns, given in expected)) == len(expected)
    assert passed(identity, call(3, 1, name="Solution().f", y=2), call(3, 2, name="Solution().f")) == 2
    assert passed("def f(x): return (1, (x,), {2: 'b'})", call([1, [5], {"2": "b"}], 5)) == 1
    wrong = [
        (1, True),
        (True, 1),
        ("1", 1),
        (1, "1"),
        ([1], [1, 1]),
        ({"a": 1}, {"b": 1}),
        (None, False),
        (0, 0.1),
    ]
    assert passed(identity, *(call(returns, given) for returns, given in wrong)) == 0


def test_floats_may_differ_by_the_tolerance() -> None:
    third = "def f(): return 1 / 3"
    assert passed(third, call(0.33333333333)) == 1
    assert passed(third, call(0.333), call(0)) == 0
    assert passed(third, call(0.333), tolerance=0.01) == 1
    assert passed("def f(): return 10**400", call(1.0)) == 0


def test_programs_are_compared_by_what_they_print() -> None:
    square = "import sys\nprint(int(sys.stdin.readline()) ** 2, '  ')\nprint()"
    assert passed(square, {"stdin": "2\n", "stdout": "4"}, {"stdin": "3\n", "stdout": "9\n\n"}) == 2
    assert passed(square, {"stdin": "2\n", "stdout": "44"}, {"stdin": "x", "stdout": ""}) == 0
    assert passed("print(4)\nraise SystemExit(1)", {"stdout": "4"}) == 0
    assert passed("import threading\nthreading.Timer(0, print, [4]).start()", {"stdout": "4"}) == 1
    assert passed("import os\nos._exit(0)", {"stdout": "4"}, {"stdout": ""}) == 1


FOOLS = {
    "equals everything": "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "f = lambda *a: A()",
    "an integer that equals": "class A(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = None\nf = lambda *a: A(5)",
    "patched builtins": "import builtins\nfor n in ('exec', 'compile', 'eval', 'print', 'str', "
        "'enumerate'):\n    setattr(builtins, n, lambda *a, **k: None)",
    "patched json": "import json\njson.dumps = lambda *a, **k: '4'\n"
        "json.encoder.c_make_encoder = None\nf = lambda *a: 5",
    "skips the tests": "import os\nos._exit(0)",
    "exits": "raise SystemExit(0)",
    "prints every answer": "for n in range(100): print(n)\nf = lambda *a: None",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(*a): return f(*a)",
    "a generator": "def f(*a):\n    while True: yield 4",
    "endless text": "f = lambda *a: '4' * 10**8",
    "deep": "def f(*a):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "writes everywhere": "import os\nfor n in range(1, 30):\n    try: os.write(n, b'0 4\\n1 9\\n"
        "')\n    except OSError: pass\nf = lambda *a: None",
    "closes everything": "import os\nos.closerange(0, 64)\nf = lambda *a: 4",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nf = lambda *a: None",
    "threads": "import threading\ndef g():\n    while True: pass\n"
        "for _ in range(50): threading.Thread(target=g).start()",
}  # fmt: skip
CALLS = (call(4, 2), call(9, 3))
PROGRAMS = ({"stdin": "2", "stdout": "4"}, {"stdin": "3", "stdout": "9"})
TESTS = ("assert f(2) == 4", "assert f(3) == 9")
IN_THE_SAME_INTERPRETER = {"equals everything", "an integer that equals"}
"""What fools tests that run beside the code (docs/security.md)."""


@pytest.mark.parametrize("trick", FOOLS)
def test_no_trick_passes_for_the_right_values(trick: str) -> None:
    assert passed(FOOLS[trick], *CALLS) == 0
    if trick not in IN_THE_SAME_INTERPRETER:
        assert passed(FOOLS[trick], *TESTS) == 0


@pytest.mark.parametrize(
    "trick", ["prints every answer", "writes everywhere", "skips the tests", "patched builtins"]
)
def test_no_trick_prints_the_right_text(trick: str) -> None:
    assert passed(FOOLS[trick], *PROGRAMS) == 0


def test_tests_keep_their_builtins_and_were_compiled_before() -> None:
    patched = (
        "import builtins\nbuiltins.sum = lambda x: 4\n"
        "builtins.exec = builtins.compile = lambda *a, **k: None\nf = lambda x: 5"
    )
    assert passed(patched, "assert sum([f(2)]) == 5", "assert sum([f(2)]) == 4") == 1


def test_expected_output_is_not_in_the_sandbox() -> None:
    searching = (
        "import sys\ndef f():\n    frame, found = sys._getframe(), ''\n    while frame:\n"
        "        found += repr(frame.f_locals)\n        frame = frame.f_back\n"
        "    return 'the' + 'secret' in found"
    )
    assert passed(searching, call(False), call("thesecret")) == 1


def test_an_expected_value_that_json_cannot_hold_is_an_error_of_the_prompt() -> None:
    with pytest.raises(RewardError, match="what JSON cannot hold"):
        judge("f = int", [CallCase("f", {1, 2})], LIMITS, 0.0)
