"""A double of Daytona: its API, and the toolbox of its machines, as its own client calls them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from rollout.sandboxes.base import SandboxDied
from tests.rollout.sandboxes.remote.machines import Machines

KEY = "dtn_0"


class Double:
    """The company: its machines, and the answers to its client."""

    def __init__(self) -> None:
        self.machines = Machines()
        self.url = ""

    def described(self, name: str, state: str = "started") -> dict[str, Any]:
        asked = self.machines.asked[name]
        return {
            "id": name, "organizationId": "o", "name": name, "user": "root", "env": {}, "public": False,
            "labels": asked["labels"], "networkBlockAll": asked.get("networkBlockAll", False), "kvm": False,
            "target": "us", "cpu": 1, "gpu": 0, "memory": 1, "disk": 1, "state": state,
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }  # fmt: skip

    async def create(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {KEY}":
            return web.json_response({"statusCode": 401, "message": "no such key"}, status=401)
        return web.json_response(self.described(await self.machines.create(await request.json())))

    async def listed(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query["labels"])
        found = map(self.described, self.machines.running)
        return web.json_response(
            {
                "items": [item for item in found if wanted.items() <= item["labels"].items()],
                "nextCursor": None,
            }
        )

    async def delete(self, request: web.Request) -> web.Response:
        if not await self.machines.remove(request.match_info["name"]):
            return web.json_response({"statusCode": 404, "message": "not found"}, status=404)
        return web.json_response(self.described(request.match_info["name"], "destroyed"))

    async def execute(self, request: web.Request) -> web.Response:
        asked = await request.json()
        try:
            ended = await self.machines.run(request.match_info["name"], ("bash", "-c", asked["command"]))
        except (KeyError, SandboxDied):
            return web.json_response({"statusCode": 502, "message": "no machine"}, status=502)
        return web.json_response({"exitCode": ended.status, "result": ended.output.decode(errors="replace")})

    async def upload(self, request: web.Request) -> web.Response:
        machine = self.machines.running.get(request.match_info["name"])
        if machine is None:
            return web.json_response({"errors": ["no machine"]}, status=502)
        path = ""
        async for part in await request.multipart():
            assert isinstance(part, aiohttp.BodyPartReader)
            if str(part.name).endswith(".path"):
                path = await part.text()
            else:
                await machine.write(path, bytes(await part.read()))
        return web.Response()

    async def download(self, request: web.Request) -> web.StreamResponse:
        (path,) = (await request.json())["paths"]
        found = await self.machines.running[request.match_info["name"]].read(path, 1 << 26)
        with aiohttp.MultipartWriter("form-data") as writer:
            part = writer.append(found or b"no file", {"Content-Type": "application/octet-stream"})
            name = "error" if found is None else "file"
            part.headers["Content-Disposition"] = f'form-data; name="{name}"; filename="{path}"'
        return web.Response(body=writer)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Double]]:
    """Serve the double; yield its URL, too."""
    double = Double()
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/sandbox", double.create)
    app.router.add_get("/sandbox", double.listed)
    app.router.add_delete("/sandbox/{name}", double.delete)
    app.router.add_post("/toolbox/{name}/process/execute", double.execute)
    app.router.add_post("/toolbox/{name}/files/bulk-upload", double.upload)
    app.router.add_post("/toolbox/{name}/files/bulk-download", double.download)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield double.url, double
    finally:
        await runner.cleanup()
        await double.machines.close()
