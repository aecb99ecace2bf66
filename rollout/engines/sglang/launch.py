"""Starts and stops SGLang's server: command line, environment, plug-in entry point, processes."""

import asyncio
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import torch
import xxhash

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.device.hf_models import code_trust
from protocol.errors import EngineError, EngineSettingsError
from protocol.host.child_environment import child_environment
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.multi_process.parent_watch import OWNER
from rollout.engines.multi_process.refusals import refusal_in
from rollout.engines.requests import check_adapters, check_fits, kv_bytes, read_config
from rollout.engines.sglang.arguments import (
    OTHER_LOGPROBS,
    check_bounded_scores,
    check_environment,
    option_words,
)
from rollout.engines.sglang.lora import NAME, NO_TENSORS, write_adapter
from rollout.engines.sglang.memory import check_memory_saver
from rollout.engines.sglang.plugin import DIRECTORY

SPARE_TOKENS = 8
"""Positions of a context that SGLang reserves; it truncates requests that would need them."""
ENTRY_POINT = "[sglang.srt.plugins]\ntether = rollout.engines.sglang.plugin:load\n"
METADATA = "Metadata-Version: 2.1\nName: tether-sglang-plugin\nVersion: 1\n"
LONGEST_TMPDIR = 70
"""Maximum length of TMPDIR, characters; Linux limits socket paths to 107, and SGLang creates some in the
directory."""
HIGHEST_PORT = 55535
"""SGLang 0.5.15 adds 10000 to the port for a server that it does not start, and exits if the sum is no valid
port."""
PORT_TRIES = 100
POLL_S = 0.1
EXIT_GRACE_S = 5.0
"""Seconds for the server's processes to exit after they were killed."""
EXIT_USAGE = 2
"""Exit code of argparse for invalid arguments."""
NOISE = re.compile(r"py-?spy|coredump|sigquit", re.IGNORECASE)
"""Matches lines that SGLang logs after the fatal error."""
LOG_TAIL = 600
"""Characters of the server's log to quote in errors."""

NamedTensors = tuple[LoraConfig, Mapping[str, torch.Tensor]]
"""(settings of an adapter, PEFT name -> A or scaled B)."""
NONE_NAMED: Mapping[str, NamedTensors] = {}


class SglangServer:
    """Server with its processes, which form a process group, and its directory."""

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        self._config = config
        self._model_dir = model_dir
        self._incarnation = incarnation
        self._process: asyncio.subprocess.Process | None = None
        self._given_up = False
        self.directory = Path()
        self.url = ""
        self.key = secrets.token_hex(16)
        """API key of requests; without it, others on this host could load other weights."""

    async def start(
        self,
        session: aiohttp.ClientSession,
        lora: LoraConfig = NO_ADAPTERS,
        named: Mapping[str, NamedTensors] = NONE_NAMED,
    ) -> None:
        """Start the server and wait until it responds.

        Args:
            session: HTTP session with the key.
            lora: rank and modules of the adapter `NAME`, which is a no-op until a version is committed.
            named: name -> further adapter, limited to modules of `lora`.

        Raises:
            EngineError: the server ended during its start; the message quotes its log.
        """
        if len(tempfile.gettempdir()) > LONGEST_TMPDIR:
            raise EngineSettingsError(
                f"TMPDIR {tempfile.gettempdir()} is too long for the names of sockets in it: "
                f"at most {LONGEST_TMPDIR} characters"
            )
        self.directory = Path(tempfile.mkdtemp(prefix="tether-sglang-"))
        _write_entry_point(self.directory)
        secret = self.directory / "server.yaml"  # command lines are readable by every user
        secret.write_text(f"api-key: {self.key}\n")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *server_command(self._config, self._model_dir, self._incarnation, port),
            "--config",
            str(secret),
        ]
        if lora.rank:
            command += adapter_options(await asyncio.to_thread(self._write, lora, named))
        try:
            if self._config.enable_sleep_mode and torch.cuda.is_available():
                await check_memory_saver(command[0])
            with (self.directory / "log").open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    env=server_environment(self._config, self.directory),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineSettingsError(f"setting engine.python: {command[0]}: {error.strerror}") from error
        await self._answering(session)

    async def _answering(self, session: aiohttp.ClientSession) -> None:
        while not await _answers(session, self.url):
            has_ended = self._process is not None and self._process.returncode is not None
            if has_ended and (refusal := refusal_in(self._log())):
                raise EngineSettingsError(f"SGLang cannot serve {self._model_dir}: {refusal}")
            self.check()
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raise EngineError if the server has ended or was given up.

        Raises:
            EngineSettingsError: the server rejected its arguments.
        """
        code = self._process.returncode if self._process is not None else None
        if code is not None:
            kind = EngineSettingsError if code == EXIT_USAGE else EngineError
            raise kind(f"SGLang's server ended with code {code}: {self.log_tail()}")
        if self._given_up:
            raise EngineError(f"SGLang's server, or one of its ranks, ended: {self.log_tail()}")

    def log_tail(self) -> str:
        """Return the end of the server's log, on one line."""
        lines = [line for line in self._log().splitlines() if line.strip() and not NOISE.search(line)]
        return " / ".join(line.strip() for line in lines[-8:])[-LOG_TAIL:] or "no log"

    def _log(self) -> str:
        with suppress(OSError):
            return (self.directory / "log").read_text(errors="replace")
        return ""

    def give_up(self) -> None:
        """Treat the server as ended because a part of it does not respond, and kill the rest. Idempotent."""
        if not self._given_up:
            self._given_up = True
            self.kill()

    def kill(self) -> None:
        """Kill all processes of the server except Python's resource tracker.

        The tracker then removes the named semaphores and exits on its own.
        """
        for process in self._group():
            with suppress(psutil.Error):
                if not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()

    async def stop(self) -> None:
        """End all processes of the server and remove their files."""
        self.kill()
        if self._process is not None:
            try:
                async with asyncio.timeout(EXIT_GRACE_S):
                    await self._process.wait()
                    await _group_ended(self._process.pid)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        if self.url:
            await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)

    def _write(self, lora: LoraConfig, named: Mapping[str, NamedTensors]) -> dict[str, Path]:
        """Write the adapters, all with the modules of `lora`; return name -> directory."""
        adapters = {NAME: (lora, NO_TENSORS), **named}
        shapes = checkpoint_shapes(self._model_dir)
        directories = {}
        for name, (config, tensors) in adapters.items():
            directory = directories[name] = self.directory / f"adapter-{name}"
            own = replace(config, target_modules=lora.target_modules)
            write_adapter(directory, shapes, own, self._config.dtype, tensors)
        return directories

    def _group(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self._process.pid:
                    found.append(process)
        return found


def server_command(config: EngineConfig, model_dir: Path, incarnation: str, port: int) -> list[str]:
    """Return the command line of SGLang's server."""
    on_gpu = torch.cuda.is_available()
    values: dict[str, Any] = {
        "model-path": model_dir,
        "load-format": "auto" if any(model_dir.glob("*.safetensors")) else "dummy",
        "dtype": config.dtype,
        "tp-size": config.tensor_parallel_size,
        "context-length": config.max_model_len + SPARE_TOKENS,
        "max-running-requests": config.max_running,
        "host": "127.0.0.1",
        "port": port,
        "log-level": "warning",
        # ignore the model's generation_config.json (top_k, repetition_penalty ...)
        "sampling-defaults": "openai",
        # engines with equal seeds would sample equal completions
        "random-seed": xxhash.xxh3_64_intdigest(incarnation.encode()) % 2**31,
    }
    flags = ["skip-tokenizer-init", "skip-server-warmup", "sleep-on-idle"]
    if on_gpu:
        values["mem-fraction-static"] = config.memory_fraction
        if config.attention_backend:
            values["attention-backend"] = config.attention_backend
    else:
        values |= {"device": "cpu", "attention-backend": "torch_native"}
        values["max-total-tokens"] = kv_tokens(config, read_config(model_dir))
    if config.enforce_eager or not on_gpu:
        flags.append("disable-cuda-graph")
    else:  # by default SGLang captures graphs for half as many requests as a GPU decodes
        values["cuda-graph-max-bs-decode"] = config.max_running
    if config.enable_sleep_mode and on_gpu:
        flags.append("enable-memory-saver")
    if config.enable_return_routed_experts:
        flags.append("enable-return-routed-experts")
    if any(code_trust().values()):
        flags.append("trust-remote-code")
    options = [f"--{name}={value}" for name, value in values.items()]
    return [
        config.python or sys.executable,
        "-m",
        "sglang.launch_server",
        *options,
        *(f"--{flag}" for flag in flags),
        *option_words(config.arguments),
    ]


def adapter_options(directories: Mapping[str, Path]) -> list[str]:
    """Return the additional options for adapters, given as name -> directory; each adapter gets a slot."""
    # versions do not contain the base weights, so SGLang keeps them in host memory during sleep
    kernels = (
        ["--enable-weights-cpu-backup"] if torch.cuda.is_available() else ["--lora-backend=torch_native"]
    )
    paths = [f"{name}={directory}" for name, directory in directories.items()]
    return ["--enable-lora", f"--max-loras-per-batch={len(paths)}", *kernels, "--lora-paths", *paths]


def server_environment(config: EngineConfig, directory: Path) -> dict[str, str]:
    """Return the server's environment: this process's, without this project's settings, plus the plug-in's.

    It lets SGLang find the plug-in and keep its files in `directory`. `engine.environment` has precedence.
    """
    defaults = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not torch.cuda.is_available():
        defaults["SGLANG_USE_CPU_ENGINE"] = "1"
    own = {
        OWNER: str(os.getpid()),
        DIRECTORY: str(directory),
        "TMPDIR": str(directory),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(config.threads),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    variables = {**own, **config.environment}
    return defaults | child_environment(variables, without={OTHER_LOGPROBS}, first=[str(directory)])


def kv_tokens(config: EngineConfig, model: dict[str, Any]) -> int:
    """Return the number of tokens whose keys and values fit into `kv_cache_mb`.

    Raises:
        EngineSettingsError: a single request of maximum length does not fit.
    """
    found = (config.kv_cache_mb << 20) // max(kv_bytes(model, getattr(torch, config.dtype).itemsize), 1)
    if found < config.max_model_len + SPARE_TOKENS:
        raise EngineSettingsError(
            f"kv_cache_mb {config.kv_cache_mb} holds {found} tokens, max_model_len is {config.max_model_len}"
        )
    return found


def check_model(config: EngineConfig, model_dir: Path, lora: LoraConfig = NO_ADAPTERS) -> dict[str, Any]:
    """Return the model's config after checks that would otherwise fail late or in another process.

    Raises:
        EngineSettingsError: a check failed; the message names the setting or file.
    """
    if torch.cuda.is_available() and config.dtype == "float32":
        raise EngineSettingsError(
            "setting engine.dtype: SGLang's CUDA kernels compute in bfloat16 and float16, not in float32"
        )
    check_environment(config)
    model = read_config(model_dir)
    check_adapters(lora, model_dir)
    check_fits(config, model, model_dir)
    if not torch.cuda.is_available():
        check_bounded_scores(model, model_dir)
    return model


def _write_entry_point(directory: Path) -> None:
    """Write the files that pip would install, because SGLang's interpreter may lack this project."""
    info = directory / "tether_sglang_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINT)


def free_port() -> int:
    """Return a currently free port, at most `HIGHEST_PORT` if the system offers one."""
    for _ in range(PORT_TRIES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port <= HIGHEST_PORT:
            break
    return port


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _group_ended(group: int) -> None:
    """Wait until no process of the group exists."""
    with suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            await asyncio.sleep(POLL_S)
