"""A double of E2B: its API, and what its machines answer, by the protocol classes of its own package."""

import asyncio
import datetime
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.process import process_pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from rollout.sandboxes.base import SandboxDied
from tests.rollout.sandboxes.remote.machines import Machines

KEY = "e2b_" + "0" * 40
NAME = "e2b-sandbox-id"


class Double(Process):
    """The company: its machines, and the answers to its client."""

    def __init__(self) -> None:
        self.machines = Machines()

    async def start(
        self, request: process_pb.StartRequest, ctx: RequestContext[Any, Any], /
    ) -> AsyncIterator[process_pb.StartResponse]:
        """Run a command, and say its output when it has ended."""
        process = request.process
        assert process is not None
        yield _said(Oneof("start", process_pb.ProcessEvent.StartEvent(pid=1)))
        name = ctx.request_headers[NAME]
        try:
            ended = await self.machines.run(name, (process.cmd, *process.args))
        except (KeyError, SandboxDied) as error:
            raise ConnectError(Code.UNAVAILABLE, str(error)) from None
        output = Oneof("stderr", ended.output)
        yield _said(Oneof("data", process_pb.ProcessEvent.DataEvent(output=output)))
        end = process_pb.ProcessEvent.EndEvent(exit_code=ended.status, exited=True, status="exited")
        yield _said(Oneof("end", end))

    async def create(self, request: Request) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "no such key"}, 401)
        name = await self.machines.create(await request.json())
        return JSONResponse(
            {"templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.6.8"}, 201
        )

    async def listed(self, request: Request) -> Response:
        wanted = dict(urllib.parse.parse_qsl(request.query_params.get("metadata", "")))
        wanted = {urllib.parse.unquote(key): urllib.parse.unquote(value) for key, value in wanted.items()}
        now = datetime.datetime.now(datetime.UTC).isoformat()
        known = {name: self.machines.asked[name]["metadata"] for name in self.machines.running}
        return JSONResponse([
            {"templateID": "base", "sandboxID": name, "clientID": "c", "startedAt": now, "endAt": now,
             "cpuCount": 1, "memoryMB": 1, "diskSizeMB": 1, "state": "running", "envdVersion": "0.6.8",
             "metadata": labels}
            for name, labels in known.items() if wanted.items() <= labels.items()
        ])  # fmt: skip

    async def delete(self, request: Request) -> Response:
        there = await self.machines.remove(request.path_params["name"])
        return Response(status_code=204 if there else 404)

    async def files(self, request: Request) -> Response:
        machine = self.machines.running[request.headers[NAME]]
        path = request.query_params["path"]
        assert request.query_params["username"] == "root"
        if request.method == "GET":
            found = await machine.read(path, 1 << 26)
            return Response(found) if found is not None else JSONResponse({"message": "no file"}, 404)
        async with request.form(max_part_size=1 << 28) as form:
            (file,) = form.getlist("file")
            await machine.write(path, await file.read())  # type: ignore[union-attr]
        return JSONResponse([{"name": path, "type": "file", "path": path}])


def _said(event: Any) -> process_pb.StartResponse:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=event))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Double]]:
    """Serve the double; yield its URL, too."""
    double = Double()
    app = Starlette(
        routes=[
            Route("/v2/sandboxes", double.create, methods=["POST"]),
            Route("/v2/sandboxes", double.listed, methods=["GET"]),
            Route("/sandboxes/{name}", double.delete, methods=["DELETE"]),
            Route("/files", double.files, methods=["GET", "POST"]),
            Route("/health", lambda request: Response(status_code=204)),
            Mount("/", ProcessASGIApplication(double)),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", double
        finally:
            server.should_exit = True
            await serving
            await double.machines.close()
