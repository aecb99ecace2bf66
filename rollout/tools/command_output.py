"""Formats a command's result as the answer to a call of the tool `shell`."""

from rollout.sandboxes.base import Executed, SandboxCommand

SHELL = ("/bin/sh", "-c", 'exec "$(command -v bash || echo /bin/sh)" -c "$0"')
"""Runs its last argument in bash, or in /bin/sh if bash is missing."""


def shell_command(text: str, wall_s: float, output: int) -> SandboxCommand:
    """Return the command for a shell line."""
    return SandboxCommand((*SHELL, text.replace("\0", "")), wall_s, output)


def format_result(executed: Executed, command: SandboxCommand, notes: tuple[str, ...] = ()) -> str:
    """Return a command's output, the exceeded limit or exit status, and additional `notes`."""
    reasons = {
        "time": f"{command.wall_s:g} s",
        "output": f"{command.output} bytes of output",
        "memory": "more memory than the sandbox has",
        "files": "more files than the sandbox may have",
    }
    lines = [executed.output.decode(errors="replace").rstrip("\n")]
    if executed.ended:
        lines.append(f"[ended after {reasons[executed.ended]}]")
    elif executed.status:
        lines.append(f"[exit status {executed.status}]")
    return "\n".join(line for line in (*lines, *notes) if line) or "(no output)"
