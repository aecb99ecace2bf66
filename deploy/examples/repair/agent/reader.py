"""Lets the model print a line of a file in two turns; runs in a sandbox, as `plain_agent`.

In its first turn the model writes a command that prints the line, following the example dialogues. The
command is executed, and its output is the next message. The second turn is the answer.
"""

from plain_agent import Messages, ask, main, run

EXAMPLE_LINES = {2: "total = 0", 9: "count += left[i]", 4: "for key in names[1:]:"}
"""Line number -> line, in the example dialogues before the task."""


def message(role: str, text: str) -> dict[str, str]:
    """Return a chat message."""
    return {"role": role, "content": text}


def dialogue(question: str, command: str, line: str) -> Messages:
    """Return the messages up to the command's output."""
    return [message("user", question), message("assistant", command), message("user", line)]


def work(text: str) -> str:
    """Let the model read the line named in a task; return its last turn."""
    before: Messages = []
    for number, line in EXAMPLE_LINES.items():
        command = f"sed -n {number}p solution.py"
        before += dialogue(f"Print line {number} of solution.py.", command, line)
        before.append(message("assistant", line))
    command = ask([*before, message("user", text)]) or ""
    output = run(command).removesuffix("[exit status 0]").strip()
    return ask([*before, *dialogue(text, command, output)]) or ""


if __name__ == "__main__":
    main(work)
