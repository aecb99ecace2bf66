"""A hub on this machine: the part of the Hugging Face hub's HTTP interface that its client uses.

The client is the real one, but for `hf_xet`, which uploads large files to another service: they come by Git
LFS. `HubServer` serves directories as repositories, each with commits and branches.
"""

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest


@dataclass
class Repository:
    """Commits of a repository, and what its branches are at."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files; `branch` is at it then."""
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        sha = hashlib.sha1(content + branch.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def found(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


@dataclass
class HubServer:
    """The repositories by kind and name, what was asked for, and the address once it serves."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)
    """Tokens that may write."""
    private: set[str] = field(default_factory=set)
    """Repositories that were made private."""
    refusal: int = 0
    """Status with which writes are answered instead; 0: they are carried out."""
    large: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> content of files that came by Git LFS, as the hub wants weights."""
    url: str = ""

    def repository(self, kind: str, name: str) -> Repository:
        return self.repositories.setdefault((kind, name), Repository())

    @contextmanager
    def serving(self) -> Iterator["HubServer"]:
        hub = self

        class Handler(_Handler):
            server_hub = hub

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="hub")
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    def use(self, patch: pytest.MonkeyPatch, cache: Path, *, offline: bool = False) -> None:
        """Point this process's client, which has read its environment already, at this hub and a cache."""
        from huggingface_hub import constants

        patch.setattr(constants, "ENDPOINT", self.url)
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            self.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def variables(self, cache: Path, *, offline: bool = False) -> dict[str, str]:
        """Return the variables that point another process's client at this hub and a cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_XET": "1",
        }


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files under a directory, by their path in it."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *_: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        """Make a repository or a branch, tell how files are sent, or add a commit of them."""
        path = unquote(urlparse(self.path).path).strip("/")
        self.server_hub.requests.append(f"POST /{path}")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, headers, answer = self._made(path.split("/")[1:], body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def do_PUT(self) -> None:
        """Take the content of a large file."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = hashlib.sha256(content).hexdigest()
        is_asked = self.path == f"/large/{name}"
        if is_asked:
            self.server_hub.large[name] = content
        self.send_response(200 if is_asked else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _made(self, parts: list[str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if not self.server_hub.writers & {self.headers.get("Authorization", "").removeprefix("Bearer ")}:
            return 401, {}, b"{}"
        if self.server_hub.refusal:
            return self.server_hub.refusal, {}, b"{}"
        if parts[-2:] == ["objects", "batch"]:
            objects = json.loads(body)["objects"]
            actions = {
                o["oid"]: {"upload": {"href": f"{self.server_hub.url}/large/{o['oid']}"}} for o in objects
            }
            answer = [{**each, "actions": actions[each["oid"]]} for each in objects]
            return _json({"transfer": "basic", "objects": answer})
        if parts == ["repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if ("model", name) in self.server_hub.repositories:
                return 409, {}, json.dumps({"url": f"{self.server_hub.url}/{name}"}).encode()
            self.server_hub.repository("model", name).commit({})
            self.server_hub.private |= {name} if asked["visibility"] == "private" else set()
            return _json({"url": f"{self.server_hub.url}/{name}"})
        name, verb, revision = "/".join(parts[1:3]), parts[3], parts[4]
        repository = self.server_hub.repository("model", name)
        if verb == "branch":
            repository.branches.setdefault(revision, repository.branches["main"])
            return _json({})
        if verb == "preupload":
            names = [item["path"] for item in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            files = [{"path": n, "uploadMode": mode, "shouldIgnore": False} for n, mode in modes.items()]
            return _json({"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        large = {x["value"]["path"]: x["value"]["oid"] for x in lines if x["key"] == "lfsFile"}
        added = {x["value"]["path"]: b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
        added |= {name: self.server_hub.large[oid] for name, oid in large.items()}
        sha = repository.commit({**repository.commits[repository.branches[revision]], **added}, revision)
        return _json({"commitUrl": f"{self.server_hub.url}/{name}/commit/{sha}", "commitOid": sha})

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        self.server_hub.requests.append(f"{self.command} /{path}")
        status, headers, body = self._found(path.split("/"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _found(self, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
        is_api = parts[0] == "api"
        parts = parts[is_api:]
        kind = {"models": "model", "datasets": "dataset"}.get(parts[0], "model")
        parts = parts[1:] if parts[0] in ("models", "datasets") else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in self.server_hub.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        repository = self.server_hub.repositories.get((kind, name))
        if repository is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        verb, revision, *file = rest or ["revision", "main"]
        commit = repository.found(revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = repository.commits[commit]
        if verb == "revision":
            return _json({"id": name, "sha": commit, "siblings": [{"rfilename": each} for each in files]})
        if verb == "tree":
            return _json(
                [
                    {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for each, data in files.items()
                ]
            )
        data = files["/".join(file)]
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
