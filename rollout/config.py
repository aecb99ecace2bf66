"""Defines the settings sections `[sampling]` and `[environment]`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from protocol.paths import BASIC, FilePath, basic_setting

MIN_TEMPERATURE = 0.01
"""Below this temperature, vLLM samples at 0.01, and engines pick the most likely token."""
SamplingMode = Literal["refuse", "run", "context"]


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Section `[sampling]`: how training samples are drawn."""

    samples_per_prompt: Annotated[int, Interval(ge=1, le=10**5)] = basic_setting(8)
    """Samples per group (n)."""
    keep_first: Annotated[int, Interval(ge=0, le=10**5)] = 0
    """k: train the first k samples of a group to finish, and cancel the other n - k. Groups end sooner, and
    trained answers are shorter than the model's (docs/algorithms.md). 0: wait for all samples."""
    temperature: Annotated[float, Interval(ge=0, le=100)] = basic_setting(1.0)
    """Divisor of the logits before sampling, in engine and trainer. Training requires at least 0.01."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Must be 1 in training, because engine and trainer must use the same distribution; see `eval.top_p`."""
    top_k: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Must be 0 in training, for the same reason as `top_p`; see `eval.top_k`."""
    max_tokens: Annotated[int, Interval(ge=1, le=10**7)] = basic_setting(128)
    """Maximum tokens of one generation. Environments with several turns may set a lower limit per turn."""

    @property
    def kept_samples(self) -> int:
        """Number of samples of a group that are trained if none fails."""
        return self.keep_first or self.samples_per_prompt


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """Section `[environment.sandbox]`: where the commands of an episode run."""

    name: str = "process"
    """process, bubblewrap, container, e2b, daytona or modal (`rollout/sandboxes/`), or your own class as
    `MODULE:CLASS`. With `process`, each tool call runs in a process of its own, and programs of `command` run
    without a sandbox."""
    memory_mb: Annotated[int, Interval(ge=16, le=2**22)] = 1024
    """Memory of a sandbox, and address space of each of its processes, MiB."""
    disk_mb: Annotated[int, Interval(ge=1, le=2**20)] = 64
    """Limit on files that an episode writes, MiB. bubblewrap: applies to the episode's directory and again to
    /tmp, both in memory."""
    processes: Annotated[int, Interval(ge=1, le=10**5)] = 64
    """Maximum processes and threads of a sandbox."""
    cpu_s: Annotated[int, Interval(ge=1, le=10**7)] = 600
    """CPU time limit of each process, seconds."""
    command_s: Annotated[float, Interval(gt=0, le=1e6)] = 60.0
    """Timeout of a tool call, seconds. Programs of `command` are limited by `environment.episode_s`."""
    starts: Annotated[int, Interval(ge=1, le=10**4)] = 8
    """Sandboxes that a rollout worker starts concurrently; further starts wait."""
    snapshot_calls: Annotated[int, Interval(ge=0, le=10**6)] = 0
    """The environment `tools` saves a snapshot of the files after every `snapshot_calls` calls. If the worker
    is lost, the episode continues from the snapshot and runs later commands again. 0: no snapshots; all
    commands run again."""
    read_only: tuple[str, ...] = ()
    """Directories of this machine to mount read-only in the sandbox, at the same path; sandboxes of cloud
    providers get a copy. bubblewrap also mounts /usr and the worker's Python."""
    directories: tuple[str, ...] = ()
    """Additional writable directories, such as /logs; in memory with bubblewrap and container."""
    image: str = ""
    """container: the image; e2b: the template; daytona: the snapshot; modal: a registry image. Each must
    provide `python3`."""
    service: str = ""
    """container: URL of Docker or of Podman's service, such as "unix:///run/podman/podman.sock"; empty:
    DOCKER_HOST. e2b, daytona: API URL instead of the provider's."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """Section `[environment]`: the code that turns a prompt into a sample."""

    name: str = basic_setting("single_turn")
    """The environment: single_turn, given, guess_number, gsm8k, textarena, openenv, harbor, tools, agent,
    command, server or verifiers (`rollout/environments/`), or your own as `MODULE:CLASS` or
    `MODULE:FUNCTION`; modules are imported from `run.modules` and `PYTHONPATH`."""
    options: dict[str, Any] = field(default_factory=dict, metadata=BASIC)
    """Options of the environment; for your own: keyword arguments of the class or function."""
    call_s: Annotated[float, Interval(gt=0, le=1e6)] = 3600.0
    """Timeout of one model call, including time in the engine's queue, seconds. A timeout fails the sample's
    attempt."""
    episode_s: Annotated[float, Interval(gt=0, le=1e6)] = 3600.0
    """Timeout of one sample over all its attempts, seconds. A timeout fails the sample."""
    max_turns: Annotated[int, Interval(ge=0, le=10**6)] = 0
    """Maximum model calls per episode. The next call ends the episode, and the sample is truncated. 0:
    limited only by `engine.max_model_len`."""
    attempts: Annotated[int, Interval(ge=1, le=100)] = 2
    """Attempts at a sample before it counts as failed. The group is trained without a failed sample if at
    least two samples remain."""
    record: Literal["auto", "on", "off"] = "auto"
    """Whether an environment that exchanges text with the model records model calls and tool results, to
    resume an episode after its worker is lost. `auto`: only `tools` records. Environments whose harness calls
    a URL always record."""
    sampling: SamplingMode = "refuse"
    """Handling of a harness's request whose temperature, top_p, stop, n or similar differ from the run's
    settings. `refuse`: return an error that names them. `run`: use the run's values and say so in a response
    header. `context`: generate with the requested values; the answer becomes context without gradient."""
    host: str = "127.0.0.1"
    """Address that the harness endpoint listens on. Addresses other than loopback need `cert_file` and
    `key_file`, and harnesses must send their task's key as the API key."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """Port of the endpoint. 0: any free port."""
    ports: Annotated[int, Interval(ge=1, le=4096)] = 64
    """Size of the port range, starting at `port`, shared by the workers of a host. Each worker uses the first
    free port. Unused with port 0."""
    cert_file: FilePath = ""
    """TLS certificate of the endpoint (PEM, including intermediates); `tether keys --endpoint` creates one.
    Empty: plain HTTP."""
    key_file: FilePath = ""
    """Private key of the certificate (PEM), readable only by its owner."""
    plain_http: bool = False
    """Allow plain HTTP off loopback, for use behind an encrypting tunnel or service mesh. Without one, anyone
    who reads the traffic can read prompts, answers and keys, and can use the keys to call the model."""
    advertise: str = ""
    """Endpoint URL for harnesses, such as "https://rollout.example:{port}"; {host} is replaced by the
    machine's name, {port} by the port. Empty: `host`, or the machine's name if `host` is a wildcard."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Settings of the sandbox that runs an episode's commands."""
