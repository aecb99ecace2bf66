"""Calls tools of an MCP server, with the client of the package `mcp`.

An empty call lists the server's tools. Otherwise the first word of a call is the tool, and the rest is a JSON
object of arguments. A call names the server:

    ```files
    read {"path": "notes.txt"}
    ```
"""

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import Any

import httpx2
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult

from protocol.errors import innermost
from rollout.tools.base import Tool
from rollout.tools.mcp_server import McpServer

log = logging.getLogger("tether.tools")

USAGE = 'a call is the name of a tool, and its arguments as a JSON object: NAME {"argument": "value"}'


class McpTool(Tool):
    """Tools of one MCP server, over one connection per episode."""

    def __init__(self, name: str, server: McpServer, stack: AsyncExitStack | None = None) -> None:
        """Args: stack: closes the episode's connection, which its first call opens."""
        self._name, self._server, self._stack = name, server, stack
        self._client: Client | None = None
        self._earlier = list[str]()
        """Calls that were answered from the record."""

    def opened(self, stack: AsyncExitStack) -> "McpTool":
        """Return the tool instance for one episode."""
        return McpTool(self._name, self._server, stack)

    def restore(self, text: str, state: str) -> None:
        """Store a recorded call, to repeat it for a restarted server program."""
        if self._client is None and self._server.command:
            self._earlier.append(text)

    async def run(self, text: str) -> str:
        """Return the tool's answer or error text.

        Raises:
            RuntimeError: the server is unreachable or has ended.
        """
        try:
            client = await self._connected()
            return await self._answer(client, text)
        except MCPError as error:
            raise self._failed(error) from None

    async def _connected(self) -> Client:
        """Return the connection. A separate task holds it, so its failure cancels no other wait."""
        if self._client is None:
            assert self._stack is not None  # set for a tool of an episode
            tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
            connected: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            closing = asyncio.Event()
            tasks.create_task(self._hold(connected, closing), name="tool.mcp")
            self._stack.callback(closing.set)
            self._client = await connected
            for text in self._earlier:
                await self._answer(self._client, text)
        return self._client

    async def _hold(self, connected: "asyncio.Future[Client]", closing: asyncio.Event) -> None:
        """Keep a connection open until `closing` is set or the connection fails."""
        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = Client(transport, read_timeout_seconds=self._server.call_s)
                connected.set_result(await stack.enter_async_context(client))
                await closing.wait()
        except Exception as error:  # the transport raises exception groups
            if connected.done():
                log.warning("tool.mcp_lost server=%s why=%r", self._name, innermost(error))
            else:
                connected.set_exception(self._failed(error))

    def _failed(self, error: Exception) -> RuntimeError:
        return RuntimeError(f"the MCP server {self._name!r}: {str(innermost(error))[:300]}")

    async def _transport(self, stack: AsyncExitStack) -> Any:
        server = self._server
        if server.command:
            program, *arguments = server.command
            return stdio_client(StdioServerParameters(command=program, args=arguments, env=server.variables))
        http = httpx2.AsyncClient(headers=server.headers(), timeout=server.call_s)
        return streamable_http_client(server.url, http_client=await stack.enter_async_context(http))

    async def _answer(self, client: Client, text: str) -> str:
        words = text.split(None, 1)
        if not words:
            tools = (await client.list_tools()).tools
            return "\n".join(
                f"{tool.name}: {tool.description or ''} {json.dumps(tool.input_schema)}" for tool in tools
            )
        try:
            arguments = json.loads(words[1] if words[1:] else "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return f"error: {USAGE}"
        try:
            return _text_of(await client.call_tool(words[0], arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise
            late = f"no answer within {self._server.call_s:g} s"
            return f"error: {late if error.code == REQUEST_TIMEOUT else error.message}"


def _text_of(result: CallToolResult) -> str:
    texts = [(part.type, getattr(part, "text", None)) for part in result.content]
    parts = [f"[{kind}]" if text is None else text for kind, text in texts]
    said = "\n".join(parts) if parts else json.dumps(result.structured_content)
    return f"error: {said}" if result.is_error else said
