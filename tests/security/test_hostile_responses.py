"""Every verifier against responses that are written to stop or to fool it; all share one pool."""

import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from protocol.errors import RewardError
from reward.config import RewardConfig, VerifierConfig
from reward.verifiers.registry import VERIFIERS
from reward.workers.pool import ScorePool
from tests.changes import slow_unless_changed
from tests.reward.judge_server import asked, judge_server
from tests.reward.reward_models import write_reward_model

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.asyncio(loop_scope="module"),
    slow_unless_changed("reward/", "deploy/locks/cpu.txt", "tests/security/"),
]

LIMITS = {"wall_s": 3.0, "cpu_s": 1, "memory_mb": 256, "processes": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "function": {"path": "own_reward:score"},
    "judge": {"model": "m", "prompt": "Is this {answer}?\n{response}", "retries": 0, "max_chars": 5000},
    "reward_model": {"sigmoid": True},
    "json_schema": {
        "schema": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    },
    "positions": {"strip": False},
    "python_tests": {"limits": LIMITS},
    "reasoning_gym": {"tag": "answer"},
}
METADATA = {
    "answer": "42", "family": "chain_sum", "params": {}, "entry": {},
    "tests": [{"call": "f", "args": [2], "returns": 4}, {"call": "f", "args": [3], "returns": 9}],
}  # fmt: skip
RIGHT = {
    "exact_match": "42",
    "function": "42",
    "json_schema": '{"age": 3}',
    "judge": "42",
    "last_integer": "so it is 42",
    "math": "\\boxed{6 \\cdot 7}",
    "positions": "42",
    "python_tests": "def f(x): return x * x",
    "reasoning_gym": "<answer>42</answer>",
}
"""Verifier -> a response of score 1; a model knows no right one."""
MEGABYTE = 1 << 20
TEXTS = {
    "empty": "",
    "a megabyte": "4" * MEGABYTE,
    "white space": " " * MEGABYTE,
    "deep brackets": "\\boxed{" + "(" * 3000 + "41" + ")" * 3000 + "}",
    "deep json": "[" * MEGABYTE,
    "a tower": "\\boxed{9^{9^{9^9}}}",
    "a tower in dollars": "the answer is $9^{9^{9^9}}$",
    "a plain tower": "the answer is 9^9^9^9^9",
    "a factorial": "\\boxed{(99999!)!}",
    "fractions": "\\boxed{" + "\\frac{1}{" * 40 + "2" + "}" * 41,
    "nul bytes": "4\x002\x00" * 1000,
    "right to left": "\u202e24\u202c",
    "other digits": "٤٢",
    "controls": "\ufeff\u200b4\u200b2\u0007",
    "thousands of boxes": "\\boxed{41}" * 5000,
    "open boxes": "\\boxed{" * 100_000,
    "dollars": "$ " * 100_000,
    "displays": "\\[ x " * 50_000,
    "open tags": "<answer>" * 100_000,
    "fences": "```json\n" * 100_000,
    "fences of blanks": "```" + " " * MEGABYTE,
    "a bomb for expressions": "(a+)+$" * 1000 + "a" * 10_000 + "!",
    "commas": "1," * 500_000,
    "points": "1." * 500_000,
    "every number": " ".join(map(str, range(41))),
    "a huge number": '{"age": "' + "9" * 100_000 + '"}',
    "huge exponents": "\\boxed{1e999999999}",
}
CODES = {
    "prints the answer": "for n in range(100): print(n)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "eats memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "closes": "import os\nos.closerange(0, 256)",
    "exits at once": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "patches builtins": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None",
    "equals": "class A:\n    def __eq__(self, other): return True\nf = lambda x: A()",
    "writes to the judge": "import os\nfor n in range(1, 30):\n    try: os.write(n, b'\\n0 4\\n"
        "1 9\\n')\n    except OSError: pass",
    "endless output": "while True: print('x' * 4096)",
    "returns a lot": "f = lambda x: 'x' * 10**9",
    "threads": "import threading\ndef g():\n    while True: pass\n"
        "for _ in range(20): threading.Thread(target=g).start()",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "patches json": "import json\njson.dumps = lambda *a, **k: '4'\nf = lambda x: 5",
    "kills": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
}  # fmt: skip
REWARD = "def score(response, metadata): return response == metadata['answer']\n"


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScorePool]:
    directory = tmp_path_factory.mktemp("modules")
    (directory / "own_reward.py").write_text(REWARD)
    model = write_reward_model(directory / "model")
    async with judge_server(quoting) as server:
        options = OPTIONS | {
            "judge": OPTIONS["judge"] | {"url": server.url},
            "reward_model": OPTIONS["reward_model"] | {"path": str(model)},
        }
        verifiers = tuple(VerifierConfig(name, options=options.get(name, {})) for name in VERIFIERS)
        config = RewardConfig(verifiers=verifiers, timeout_s=60.0, workers=1)
        async with ScorePool(config, [str(directory)]) as pool:
            yield pool


def quoting(request: dict[str, Any]) -> str:
    """Judge a response, and quote it before the score."""
    question = asked(request)
    return f"{question}\nScore: {int(question.partition(chr(10))[2] == '42')}"


async def test_the_right_response_of_each_verifier_scores_one(pool: ScorePool) -> None:
    assert RIGHT.keys() == {*VERIFIERS} - {"constant", "reward_model"}
    components = (await pool.score("q", list(RIGHT.values()), METADATA)).components
    assert {name: components[name][i] for i, name in enumerate(RIGHT)} == dict.fromkeys(RIGHT, 1.0)


async def test_no_hostile_text_stops_a_verifier_or_gets_the_score_of_a_right_one(pool: ScorePool) -> None:
    """Each within the time limit: a verifier that exceeds it raises."""
    components = (await pool.score("q", list(TEXTS.values()), METADATA)).components
    assert set(components) == set(VERIFIERS)
    for name, scores in components.items():
        right = {text for text, score in zip(TEXTS, scores, strict=True) if not 0 <= score < 1}
        assert right == set(), name
        assert all(math.isfinite(score) for score in scores)


async def test_no_hostile_code_stops_a_verifier_or_gets_the_score_of_a_right_one(pool: ScorePool) -> None:
    codes = [f"```python\n{code}\n```" for code in CODES.values()]
    components = (await pool.score("q", codes, METADATA)).components
    for name, scores in components.items():
        assert {code for code, score in zip(CODES, scores, strict=True) if score >= 1} == set(), name


async def test_a_lone_surrogate_is_refused_by_name_and_the_pool_goes_on(pool: ScorePool) -> None:
    with pytest.raises(RewardError, match="no valid text"):
        await pool.score("q", ["42\ud800"], METADATA)
    assert (await pool.score("q", ["42"], msgspec.msgpack.encode(METADATA))).components["exact_match"] == [
        1.0
    ]
