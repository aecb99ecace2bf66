"""Writes repair tasks: programs with one injected bug and hidden tests.

    python deploy/examples/repair/make_tasks.py [--out runs/repair-tasks] [--tasks 1000] [--seed 0]

The rungs of the ladder, in order of difficulty:

- `number`: print the number of the wrong line, which the question names
- `choice`: print which of two lines is wrong, 1 or 2
- `read`: print the line with a given number; only the sandbox has the file
- `line`: print the wrong line, one of two given lines
- `one`: repair a program with one function
- `many`: repair one of four functions

The same seed writes the same tasks.
"""

import argparse
import ast
import json
import random
from pathlib import Path
from typing import Any

from mutations import mutant
from programs import inputs, program

RUNGS = {"number": 1, "choice": 1, "read": 1, "line": 1, "one": 1, "many": 4}
"""Rung -> number of functions per program."""
TESTS = 12
MAX_SOLVED_EXAMPLES = 3
"""Number of solved tasks in the dialogue before the question, for the rung `line`."""
QUESTIONS = {
    "number": "Line {line} of solution.py is wrong. Print its number: ",
    "choice": "One of these two lines of solution.py is wrong:\n{lines}\nPrint its number, 1 or 2: ",
    "read": "Print line {line} of solution.py.",
    "line": "One line of solution.py is wrong. The wrong line is one of these two:\n{lines}\nPrint it.",
    "one": "solution.py has one wrong line. Repair the file.\n{example}",
    "many": "solution.py has one wrong line, in any of its functions. Repair the file.\n{example}",
}


def results(source: str, values: list[list[int]]) -> list[Any]:
    """Call a program's `solve` with each value; return the results, or the names of exceptions."""
    scope: dict[str, Any] = {}
    exec(compile(source, "solution.py", "exec"), scope)
    found: list[Any] = []
    for value in values:
        try:
            found.append(scope["solve"](value))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def task(seed: str, rung: str) -> dict[str, Any]:
    """Return a task: a program whose bug changes the results of at least a third of its hidden tests."""
    for attempt in range(1000):
        generator = random.Random(f"{seed} {attempt}")
        right = ast.unparse(ast.parse(program(generator, RUNGS[rung])))
        values = inputs(generator, TESTS)
        wrong, line = mutant(right, generator)
        expected, found = results(right, values), results(wrong, values)
        failing = [i for i in range(TESTS) if expected[i] != found[i]]
        if len(failing) >= TESTS // 3 and not any(isinstance(value, str) for value in expected):
            break
    else:
        raise ValueError(f"seed {seed}: no bug of 1000 shows in the tests")
    example = values[failing[0]]
    lines = wrong.splitlines()
    other_line = generator.choice([i for i, text in enumerate(lines, 1) if text.strip() and i != line])
    pair = sorted((line, other_line))
    two = [lines[i - 1].strip() for i in pair]
    question = QUESTIONS[rung].format(
        lines="\n".join(f"{i}: {text}" for i, text in enumerate(two, 1))
        if rung == "choice"
        else "\n".join(two),
        line=line,
        example=f"solve({example}) returns {found[failing[0]]}; it should return {expected[failing[0]]}.",
    )
    answers = {"number": str(line), "choice": str(pair.index(line) + 1)}
    file_block = "" if rung in (*answers, "read") else f"solution.py:\n```python\n{wrong}\n```\n"
    return {
        "prompt": file_block + question,
        "question": question,
        "rung": rung,
        "files": {"solution.py": wrong},
        "hidden_line": answers.get(rung, lines[line - 1].strip()),
        "hidden_tests": [
            {"call": "solve", "args": [value], "returns": result}
            for value, result in zip(values, expected, strict=True)
        ],
    }


def dialogue(row: dict[str, Any], solved: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return a task's question without the file, after solved questions with their answers."""
    messages = []
    for other in solved:
        messages.append({"role": "user", "content": other["question"]})
        messages.append({"role": "assistant", "content": other["hidden_line"]})
    return [*messages, {"role": "user", "content": row["question"]}]


def main() -> None:
    """Write a file of tasks for each rung."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/repair-tasks"))
    parser.add_argument("--tasks", type=int, default=1000, help="of each rung")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    solved = [task(f"solved {number}", "line") for number in range(MAX_SOLVED_EXAMPLES)]
    for rung in RUNGS:
        rows = [task(f"{words.seed} {rung} {number}", rung) for number in range(words.tasks)]
        lines = [
            json.dumps({**row, "dialogue": dialogue(row, solved)} if rung == "line" else row) for row in rows
        ]
        (words.out / f"{rung}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{len(set(lines))} tasks in {words.out / f'{rung}.jsonl'}")


if __name__ == "__main__":
    main()
