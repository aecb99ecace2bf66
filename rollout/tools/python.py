"""Runs Python code of the model in the sandbox, each call in an interpreter of its own.

The answer is what the code prints, the value of its last line if that is an expression, and the traceback of
an exception.
"""

import asyncio
import functools
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor

from reward.sandbox.runner import NEEDED, Limits, Verdict, run_programs

log = logging.getLogger("tether.tools")

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
"""What runs in the sandbox: it exits with 0 whatever the code raises."""


class PythonTool:
    """Tool `python`. Calls share nothing: no variables, no files."""

    def __init__(self, limits: Limits, parallel: int) -> None:
        """Run at most `parallel` calls at once; others wait."""
        self._limits = limits
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="tool-python")

    async def run(self, text: str) -> str:
        """Return what the code printed. Cancelling kills it, and waits until it has ended.

        Raises:
            RewardError: the sandbox cannot be set up.
        """
        read, write = os.pipe()
        try:
            verdict = await self._run(PROGRAM.format(code=text), read, write)
        finally:
            os.close(read)
            os.close(write)
        _warn(verdict.isolation)
        if 0 in verdict.outputs:
            return str(json.loads(verdict.outputs[0])) or "(no output)"
        if verdict.timed_out:
            return f"error: not done within {self._limits.wall_s:g} s"
        return "error: the code was ended: it exceeded a limit, or exited with a status"

    async def _run(self, program: str, read: int, write: int) -> Verdict:
        future = self._threads.submit(run_programs, program, [""], self._limits, read)
        wrapped = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            if not future.cancel():
                os.write(write, b"x")
                await asyncio.wait([wrapped])
                if not wrapped.cancelled():
                    wrapped.exception()  # it is of no interest any more
            raise


@functools.cache
def _warn(isolation: frozenset[str]) -> None:
    """Log, once for each worker, which kinds of isolation this machine does not offer."""
    if missing := sorted(NEEDED - isolation):
        log.warning("sandbox.weak missing=%s (see docs/security.md)", ",".join(missing))
