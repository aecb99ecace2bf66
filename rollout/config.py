"""Defines sections `[sampling]` and `[environment]`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from protocol.paths import FIRST, FilePath, set_first

MIN_TEMPERATURE = 0.01
"""Below it, vLLM samples at 0.01, and engines take the most likely token."""
SamplingMode = Literal["refuse", "run", "context"]


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Section `[sampling]`: how samples are drawn for training."""

    samples_per_prompt: Annotated[int, Interval(ge=1, le=10**5)] = set_first(8)
    """n, the samples of a group."""
    keep_first: Annotated[int, Interval(ge=0, le=10**5)] = 0
    """k: the first k samples of a group to finish are trained, and the other n - k are cancelled then. Groups
    end sooner, and trained answers are shorter than the model's (docs/algorithms.md). 0: all are waited for.
    """
    temperature: Annotated[float, Interval(ge=0, le=100)] = set_first(1.0)
    """Divides the logits before sampling, in engine and trainer alike. Training refuses less than 0.01."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Refused below 1 in training, where engine and trainer have to use the same distribution; see
    `eval.top_p`."""
    top_k: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Refused above 0 in training, as `top_p` is below 1; see `eval.top_k`."""
    max_tokens: Annotated[int, Interval(ge=1, le=10**7)] = set_first(128)
    """Limit of one generation, tokens. An environment with several turns may set less for each."""

    @property
    def kept_samples(self) -> int:
        """Samples of a group that are trained, unless some fail."""
        return self.keep_first or self.samples_per_prompt


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """Section `[environment.sandbox]`: where the commands of an episode run."""

    name: str = "process"
    """process, bubblewrap, container, e2b, daytona or modal (`rollout/sandboxes/`), or one of your own as
    `MODULE:CLASS`. With `process` the tools run each call for itself, and programs of `command` run without a
    sandbox."""
    memory_mb: Annotated[int, Interval(ge=16, le=2**22)] = 1024
    """Memory of a sandbox, MiB, and address space of each of its processes."""
    disk_mb: Annotated[int, Interval(ge=1, le=2**20)] = 64
    """Files that an episode may write, MiB. bubblewrap: of its directory and as much again of /tmp, in
    memory."""
    processes: Annotated[int, Interval(ge=1, le=10**5)] = 64
    """Processes and threads of a sandbox."""
    cpu_s: Annotated[int, Interval(ge=1, le=10**7)] = 600
    """CPU seconds of each process."""
    command_s: Annotated[float, Interval(gt=0, le=1e6)] = 60.0
    """How long a call of a tool may run, seconds. A program of `command` has `environment.episode_s`."""
    starts: Annotated[int, Interval(ge=1, le=10**4)] = 8
    """Sandboxes that a rollout worker starts at once; others wait for their turn."""
    snapshot_calls: Annotated[int, Interval(ge=0, le=10**6)] = 0
    """The environment `tools` keeps a snapshot of the files after every so many calls, from which the episode
    continues if its worker is lost; later commands run again. 0: none, all commands run again."""
    read_only: tuple[str, ...] = ()
    """Directories of this machine that can be read in the sandbox, under their own names; machines of
    companies get a copy. bubblewrap has /usr and the worker's Python, too."""
    directories: tuple[str, ...] = ()
    """More directories that commands may write, such as /logs, in memory with bubblewrap and container."""
    image: str = ""
    """container: the image; e2b: the template; daytona: the snapshot; modal: the image of a registry; each
    has Python as `python3`."""
    service: str = ""
    """container: URL of Docker or of Podman's service, such as "unix:///run/podman/podman.sock". Empty: as
    DOCKER_HOST says. e2b, daytona: URL of another API than the company's."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """Section `[environment]`: what turns a prompt into a sample."""

    name: str = set_first("single_turn")
    """The environment: single_turn, given, guess_number, gsm8k, textarena, openenv, harbor, tools, agent,
    command, server or verifiers (`rollout/environments/`), or one of your own as `MODULE:CLASS` or
    `MODULE:FUNCTION`; the module is found in `run.modules` and `PYTHONPATH`."""
    options: dict[str, Any] = field(default_factory=dict, metadata=FIRST)
    """Options of that environment; of your own: keyword arguments of the class or the function."""
    call_s: Annotated[float, Interval(gt=0, le=1e6)] = 3600.0
    """How long one call of the model may take, seconds, waiting for the engine included. A longer one fails
    the sample's attempt."""
    episode_s: Annotated[float, Interval(gt=0, le=1e6)] = 3600.0
    """How long one sample may take, all its attempts together, seconds. A longer one fails the sample."""
    max_turns: Annotated[int, Interval(ge=0, le=10**6)] = 0
    """Calls of the model in one episode. One more ends it: the sample is truncated. 0: as many as fit
    `engine.max_model_len`."""
    attempts: Annotated[int, Interval(ge=1, le=100)] = 2
    """Times that a sample is tried before it has failed. Its group is trained without it if at least two
    samples remain."""
    record: Literal["auto", "on", "off"] = "auto"
    """Whether an environment that exchanges text with the model records calls of the model and results of
    tools, so that an episode whose worker was lost continues where it was. `auto`: `tools` alone does; `on`,
    `off`. Those whose harness talks to a URL always do."""
    sampling: SamplingMode = "refuse"
    """What becomes of a harness's request whose temperature, top_p, stop, n and the like are not the run's.
    `refuse`: an error that names them. `run`: the run's apply, and a header says so. `context`: it is
    generated as asked, and its answer is context without gradient."""
    host: str = "127.0.0.1"
    """Address that the endpoint of harnesses listens on. Off loopback it needs `cert_file` and `key_file`,
    and a harness sends its task's key as the API key."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """Port of the endpoint. 0: any free one."""
    ports: Annotated[int, Interval(ge=1, le=4096)] = 64
    """How many ports from `port` on the workers of a host share: each takes the first that is free. Not used
    with port 0."""
    cert_file: FilePath = ""
    """Certificate of the endpoint (PEM, with intermediate ones), by which it speaks TLS; `tether keys
    --endpoint` makes one. Empty: plain HTTP."""
    key_file: FilePath = ""
    """Its key (PEM), readable by its owner only."""
    plain_http: bool = False
    """Whether the endpoint may speak plain HTTP off loopback, because a tunnel or a service mesh encrypts.
    Where none does, who reads the traffic reads prompts, answers and keys, and can make calls with these."""
    advertise: str = ""
    """URL of the endpoint that harnesses get, such as "https://rollout.example:{port}"; {host} stands
    for the machine's name, {port} for the port. Empty: `host`, or that name where `host` is a wildcard."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where the commands of an episode run."""
