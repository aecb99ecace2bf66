"""Serves MCP by the package `mcp`: on standard input, or with an argument on a free port, which it says."""

import os
import sys

from mcp.server import MCPServer

server = MCPServer("things", log_level="INFO" if sys.argv[1:] else "ERROR")
state = {"calls": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Say how many calls there were, in which process."""
    state["calls"] += 1
    return f"{state['calls']} {os.getenv('WHO', '')}"


@server.tool()
def hush() -> str:
    """Say no word."""
    return ""


@server.tool()
def end() -> None:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=0)
    else:
        server.run("stdio")
