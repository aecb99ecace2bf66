"""Defines how an MCP server is started or reached; the package `mcp` is not needed to read it."""

import os
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class McpServer:
    """A program that speaks MCP by its standard input and output, or a service that speaks it by HTTP."""

    command: tuple[str, ...] = ()
    """The program and its arguments; each episode that calls it has a process."""
    url: str = ""
    """Where a service listens, such as http://127.0.0.1:8000/mcp (streamable HTTP)."""
    variables: dict[str, str] = field(default_factory=dict)
    """command: environment variables, with HOME, PATH and the like."""
    key_env: str = ""
    """url: environment variable of the rollout worker with a key, which is sent as a bearer token."""
    call_s: Annotated[float, Interval(gt=0, le=1e6)] = 60.0
    """How long a call may take, seconds; a longer one is answered with an error."""

    def check(self, name: str) -> None:
        """Check that there is one way to reach it.

        Raises:
            SettingsError: names the option.
        """
        if bool(self.command) == bool(self.url):
            raise SettingsError(
                f"setting environment.options.mcp.{name}: one of command and url, not "
                + ("both" if self.url else "neither")
            )
        if self.key_env and self.key_env not in os.environ:
            raise SettingsError(
                f"setting environment.options.mcp.{name}.key_env: there is no variable {self.key_env}"
            )

    def headers(self) -> dict[str, str]:
        """Return the headers of requests to a service."""
        return {"Authorization": f"Bearer {os.environ[self.key_env]}"} if self.key_env else {}
