"""Runs the model's Python code in the sandbox; each call has a new interpreter.

The answer contains the code's output, the value of a final expression, and the traceback of an exception.
"""

import json

from reward.sandbox.runner import Limits
from rollout.sandboxes.runs import SandboxRuns
from rollout.tools.base import Tool

PROGRAM = """\
import ast, sys, traceback
sys.stderr = sys.stdout
code = {code!r}
scope = {{"__name__": "__main__"}}
try:
    tree = ast.parse(code, "code.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "code.py", "exec"), scope)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "code.py", "eval"), scope)
        if value is not None:
            print(repr(value))
except SystemExit:
    pass
except BaseException as error:
    error.__traceback__ = error.__traceback__.tb_next
    traceback.print_exception(error)
"""
"""Program in the sandbox; it exits with 0 even if the code raises."""


class PythonTool(Tool):
    """Tool `python`. Calls share neither variables nor files."""

    def __init__(self, limits: Limits, runs: SandboxRuns) -> None:
        self._limits, self._runs = limits, runs

    async def run(self, text: str) -> str:
        """Return the code's output. Cancelling kills it and waits for its end.

        Raises:
            RewardError: the sandbox cannot be set up.
        """
        verdict = await self._runs.run(PROGRAM.format(code=text), "", self._limits)
        if 0 in verdict.outputs:
            return str(json.loads(verdict.outputs[0])) or "(no output)"
        if verdict.timed_out:
            return f"error: not done within {self._limits.wall_s:g} s"
        return "error: the code was ended: it exceeded a limit, or exited with a status"
