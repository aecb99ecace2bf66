"""Defines how an MCP server is started or reached, without the package `mcp`."""

import os
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class McpServer:
    """Program that speaks MCP over standard input and output, or service that speaks MCP over HTTP."""

    command: tuple[str, ...] = ()
    """Program and arguments; each episode that calls the server starts a process."""
    url: str = ""
    """URL of a service, such as http://127.0.0.1:8000/mcp (streamable HTTP)."""
    variables: dict[str, str] = field(default_factory=dict)
    """command: environment variables, in addition to HOME, PATH and similar ones."""
    key_env: str = ""
    """url: environment variable of the rollout worker with a key to send as a bearer token."""
    call_s: Annotated[float, Interval(gt=0, le=1e6)] = 60.0
    """Timeout of a call, seconds; a timeout is answered with an error."""

    def check(self, name: str) -> None:
        """Check that exactly one of `command` and `url` is set, and that the key exists.

        Raises:
            SettingsError: the options are invalid; the message names the option.
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
        """Return the HTTP headers for requests to a service."""
        return {"Authorization": f"Bearer {os.environ[self.key_env]}"} if self.key_env else {}
