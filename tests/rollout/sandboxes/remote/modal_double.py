"""A double of Modal: its API, and the router of commands, by the protocol classes of its own package."""

import asyncio
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpclib
from google.protobuf.json_format import MessageToDict
from grpclib.const import Status
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from rollout.sandboxes.base import Sandbox, SandboxDied
from tests.rollout.sandboxes.remote.machines import Machines

KEY = {"x-modal-token-id": "ak-0", "x-modal-token-secret": "as-0"}
CHUNK = 1 << 20
TOKEN = "e30.eyJleHAiOiA5OTk5OTk5OTk5fQ.x"
"""A JWT that expires in the year 2286."""
CREATED = 1.0
"""When all machines were created: a page that begins before it is empty."""
DONE = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)


@dataclass
class Process:
    """A command, its input, and what it has said and its status once it has run."""

    machine: str
    line: str
    input: bytearray = field(default_factory=bytearray)
    output: bytes = b""
    errors: bytes = b""
    status: int | None = None


class Company(ModalClientBase):
    """The API: apps, images, machines."""

    def __init__(self) -> None:
        self.machines = Machines()
        self.url = ""
        self.silent = ""
        """Name of a request that is not answered."""
        self.refusal: Status | None = None
        """Status with which a new machine is refused."""

    async def _wait(self, request: str) -> None:
        if self.silent == request:
            await asyncio.Event().wait()

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=TOKEN))

    async def AppGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        await self._wait("AppGetOrCreate")
        if KEY.items() - stream.metadata.items():
            raise grpclib.GRPCError(Status.UNAUTHENTICATED, "no such key")
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(
            api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)
        )

    async def ImageGetOrCreate(self, stream: Any) -> None:
        self.image = await stream.recv_message()
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=DONE))

    async def SandboxCreateV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        await self._wait("SandboxCreateV2")
        if self.refusal is not None:
            raise grpclib.GRPCError(self.refusal, "no such image")
        name = await self.machines.create(
            {**MessageToDict(asked.definition), "tags": {tag.tag_name: tag.tag_value for tag in asked.tags}}
        )
        access = api_pb2.CommandRouterAccess(jwt=TOKEN, url=self.url)
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=name, command_router_access=access)
        )

    async def SandboxGetTaskIdV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        await stream.send_message(api_pb2.SandboxGetTaskIdResponse(task_id=asked.sandbox_id))

    async def SandboxListV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        await self._wait("SandboxListV2")
        wanted = {tag.tag_name: tag.tag_value for tag in asked.tags}
        found = [
            api_pb2.SandboxInfo(id=name, created_at=CREATED)
            for name in self.machines.running
            if wanted.items() <= self.machines.asked[name]["tags"].items()
        ]
        is_last = asked.before_timestamp == CREATED
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=[] if is_last else found))

    async def SandboxTagsGetV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        tags = self.machines.asked[asked.sandbox_id]["tags"]
        await stream.send_message(
            api_pb2.SandboxTagsGetResponse(
                tags=[api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
            )
        )

    async def SandboxTerminateV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        await self.machines.remove(asked.sandbox_id)
        await stream.send_message(api_pb2.SandboxTerminateResponse())


class Router(TaskCommandRouterBase):
    """The commands of all machines."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._processes = dict[str, Process]()

    async def TaskExecStart(self, stream: Any) -> None:
        asked = await stream.recv_message()
        if asked.task_id not in self._machines.running:
            raise grpclib.GRPCError(Status.NOT_FOUND, "no machine")
        shell, option, line = asked.command_args
        assert (shell, option) == ("sh", "-c")
        self._processes[asked.exec_id] = Process(asked.task_id, line)
        await stream.send_message(router_pb2.TaskExecStartResponse())

    async def TaskExecStdinWrite(self, stream: Any) -> None:
        asked = await stream.recv_message()
        process = self._processes[asked.exec_id]
        assert asked.offset == len(process.input)
        process.input += asked.data
        await stream.send_message(router_pb2.TaskExecStdinWriteResponse())

    async def TaskExecStdioRead(self, stream: Any) -> None:
        asked = await stream.recv_message()
        process = await self._run(asked.exec_id)
        is_output = asked.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        data = (process.output if is_output else process.errors)[asked.offset :]
        for first in range(0, len(data), CHUNK):
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data[first : first + CHUNK]))

    async def TaskExecWait(self, stream: Any) -> None:
        asked = await stream.recv_message()
        process = await self._run(asked.exec_id)
        await stream.send_message(router_pb2.TaskExecWaitResponse(code=process.status))

    async def _run(self, name: str) -> Process:
        """Run a command, which has all its input, if it has not run."""
        process = self._processes[name]
        if process.status is None:
            try:
                await self._follow(process, self._machines.running[process.machine])
            except (KeyError, SandboxDied) as error:
                raise grpclib.GRPCError(Status.NOT_FOUND, str(error)) from None
        return process

    async def _follow(self, process: Process, machine: Sandbox) -> None:
        """Copy a file to or from a machine, or run a command there."""
        words = shlex.split(process.line)
        process.status = 0
        if words[:2] == ["cat", ">"]:
            await machine.write(words[2], bytes(process.input))
        elif words[0] == "cat":
            process.output = await machine.read(words[1], 1 << 26) or b""
        else:
            ended = await self._machines.run(process.machine, ("sh", "-c", process.line))
            process.errors, process.status = ended.output, ended.status


class ClosingServer(Server):
    """A server that closes its connections, too."""

    def __init__(self, company: Company) -> None:
        super().__init__([company, Router(company.machines)])
        self._protocols: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        self._protocols.append(super()._protocol_factory())
        return self._protocols[-1]

    async def wait_closed(self) -> None:
        await super().wait_closed()
        for protocol in self._protocols:
            protocol.connection_lost(None)
        await asyncio.sleep(0)  # the transports close


for server in (Company, Router):
    server.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # the others are not called


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Company]]:
    """Serve the double; yield its URL, too."""
    company = Company()
    server = ClosingServer(company)
    with socket.create_server(("127.0.0.1", 0)) as near:
        company.url = f"http://127.0.0.1:{near.getsockname()[1]}"
        await server.start(sock=near)
        try:
            yield company.url, company
        finally:
            server.close()
            await server.wait_closed()
            await company.machines.close()
