"""Settings of a process: defaults < TOML or JSON file < `TETHER_*` variables < `--set a.b=c`.

Each component's section is a frozen dataclass beside the component; this module composes them and nothing more. A variable is named
`TETHER_SECTION__KEY`; the ones that people set most have short names (`SHORT_NAMES`). An unknown key fails and names its neighbour.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from protocol.errors import SettingsError
from protocol.ids import checked_run_id
from protocol.lora import LoraConfig
from protocol.names import checked_name
from protocol.staleness import Bound, Policy
from reward.config import RewardConfig
from rollout.engines.base import DTYPES, EngineConfig
from rollout.engines.registry import CAN_SLEEP, ENGINES, SERVE_ADAPTERS
from rollout.environments.base import EnvironmentConfig
from rollout.generate import SamplingConfig
from rollout.prompts.base import PromptConfig
from rollout.render import RenderConfig
from services.budget import ColocatedConfig
from services.bus.config import BusConfig
from services.ledger.limits import ARCHIVE_LIMIT
from services.placement import ServicesConfig, check_gpus
from services.pool import check_pool
from services.setting_sources import assign, from_environ, parse, read_file, refuse_unknown
from services.shared_settings import check_shared
from trainer.config import (
    ALGORITHMS,
    BACKENDS,
    TRANSPORTS,
    AlgorithmConfig,
    OptimizerConfig,
    ParallelConfig,
    ScratchConfig,
    TrainerConfig,
    WeightConfig,
)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Section `[run]`."""

    name: str = "run"
    dir: str = ""
    """Everything the run writes; by default runs/NAME."""
    steps: int = 100


@dataclass(frozen=True, slots=True)
class BoundConfig:
    """Section `[bound]`: the staleness bound and what counts as too many failures."""

    max_staleness: int = 1
    groups_per_step: int = 8
    staleness_policy: Policy = Policy.MASK
    max_attempts: int = 5
    drop_share: float = 0.9
    drop_window: int = 64

    @property
    def bound(self) -> Bound:
        return Bound(self.max_staleness, self.groups_per_step, self.staleness_policy)


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """Section `[ledger]`."""

    url: str = ""
    """redis:// or rediss:// URL; empty: an embedded server in the run directory. Set it by TETHER_REDIS_URL, not on a command line."""
    password_file: str = ""
    """A file with the password, readable by its owner only, instead of one in the URL."""
    ca_file: str = ""
    """rediss: certificates (PEM) that the server's is checked against; empty: those of the system."""
    timeout_s: float = 10.0
    retry_s: float = 60.0
    """How long a lost connection is retried before the process gives up."""
    ttl_s: float = 5.0
    """Time-to-live of a process in the registry."""
    archive_limit: int = ARCHIVE_LIMIT
    """Events that may wait for the archive before leasing stops."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Section `[model]`: a Hugging Face directory, or a small model made from scratch."""

    path: str = ""
    scratch: ScratchConfig | None = None


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Section `[rollout]`."""

    groups_in_flight: int = 32
    """Groups that one worker generates or holds at a time."""
    lease_s: float = 30.0
    """A lease not extended for so long goes to another worker; extended every third of it."""
    drain_s: float = 10.0
    """How long a stopping worker finishes what it holds before it hands it back."""
    prompt_failures: int = 1
    """Attempts of a prompt that cannot be rendered or generated before its group is dropped."""


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """Section `[monitor]`."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port; it is printed and registered."""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Section `[eval]`: scoring held-out prompts before and after a run."""

    at_end: bool = False
    prompts: int = 200
    samples: int = 1
    """Sampled answers a prompt for the sampled score; 0 leaves it out."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections of a run."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    run: RunConfig = field(default_factory=RunConfig)
    bound: BoundConfig = field(default_factory=BoundConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    render: RenderConfig = field(default_factory=RenderConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    weights: WeightConfig = field(default_factory=WeightConfig)
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    services: ServicesConfig = field(default_factory=ServicesConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir or f"runs/{self.run.name}").absolute()

    @property
    def model_dir(self) -> Path:
        """Where the initial model lies: the user's directory, or the one made from scratch in the run directory."""
        return Path(self.model.path).absolute() if self.model.path else self.run_dir / "model"


_adapter: TypeAdapter[Settings] = TypeAdapter(Settings)


def load_settings(path: str | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    """Compose the settings of a process.

    Args:
        path: a TOML or JSON file; by default that of `TETHER_CONFIG`, or none.
        overrides: `section.key=value` strings; values are TOML, or plain strings where they are not, or where a string is wanted.
        environ: by default the process's environment.

    Raises:
        SettingsError: naming the setting, what is wrong and the nearest known name.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get("TETHER_CONFIG") or None
    values: dict[str, Any] = read_file(Path(path)) if path else {}
    for dotted, text, source in from_environ(environ):
        assign(values, dotted, parse(text, dotted, Settings), source)
    for override in overrides:
        dotted, separator, text = override.partition("=")
        if not separator:
            raise SettingsError(f"--set {override!r}: write section.key=value")
        if dotted.strip() == "ledger.url" and "@" in text:
            raise SettingsError("--set ledger.url: every user can read a command line; set TETHER_REDIS_URL, or ledger.password_file")
        assign(values, dotted.strip(), parse(text.strip(), dotted.strip(), Settings), f"--set {dotted}")
    refuse_unknown(values, Settings, "")
    try:
        settings = _adapter.validate_python(values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None
    _check(settings)
    return settings


def run_settings(run_dir: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings that a run was last started with; of the environment only the ledger's URL counts.

    Raises SettingsError if there is no run in the directory.
    """
    path = run_dir / "settings.json"
    if not path.is_file():
        raise SettingsError(f"no run in {run_dir}: there is no settings.json; give the directory of a run, such as runs/demo")
    environ = {name: value for name, value in os.environ.items() if name == "TETHER_REDIS_URL"}
    return load_settings(str(path), [*overrides, f"run.dir={json.dumps(str(run_dir.absolute()))}"], environ)


def dump_settings(settings: Settings, path: Path) -> None:
    """Write the effective settings as JSON, for the processes of the run. The ledger's URL stays out: it may hold a password."""
    values = _adapter.dump_python(settings, mode="json")
    values["ledger"]["url"] = ""
    values["run"]["dir"] = str(settings.run_dir)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n")
    temporary.replace(path)


def _explain(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    return f"setting {where}: {error['msg']}" + ("" if where.startswith("ledger") else f" (got {error['input']!r})")


RANGES: dict[str, tuple[float, float]] = {
    "run.steps": (1, 1e9),
    "services.rollouts": (0, 10_000),
    "services.rewards": (0, 10_000),
    "ledger.archive_limit": (1, 1e9),
    "bound.max_staleness": (0, 1000),
    "bound.groups_per_step": (1, 1e6),
    "bound.max_attempts": (1, 1e6),
    "bound.drop_share": (0, 1),
    "bound.drop_window": (1, 1e6),
    "rollout.groups_in_flight": (1, 1e5),
    "rollout.lease_s": (0.5, 1e6),
    "sampling.samples_per_prompt": (1, 1e5),
    "sampling.max_tokens": (1, 1e7),
    "sampling.temperature": (0, 100),
    "optimizer.lr": (0, 1e3),
    "trainer.micro_batch_size": (1, 1e6),
    "trainer.checkpoint_every": (1, 1e9),
    "trainer.keep_checkpoints": (1, 1e6),
    "trainer.archive_mb": (0, 1e9),
    "trainer.memory_gb": (0, 1e6),
    "engine.staging_mb": (0, 1e9),
    "engine.buffer_size_gb": (0, 1e6),
    "engine.max_batch_tokens": (0, 1e9),
    "colocated.wait_s": (1, 1e6),
    "parallel.tensor_model_parallel_size": (1, 4096),
    "parallel.pipeline_model_parallel_size": (1, 4096),
    "parallel.data_parallel_size": (1, 4096),
    "weights.bucket_mb": (1, 1e5),
    "lora.rank": (0, 1e5),
}
"""Setting -> smallest and largest value."""


def _check(settings: Settings) -> None:
    checked_run_id(settings.run.name)
    checked_name(settings.engine.name, ENGINES, "setting engine.name:")
    checked_name(settings.engine.dtype, DTYPES, "setting engine.dtype:")
    checked_name(settings.trainer.backend, BACKENDS, "setting trainer.backend:")
    checked_name(settings.algorithm.name, ALGORITHMS, "setting algorithm.name:")
    if settings.lora.rank and settings.engine.name not in SERVE_ADAPTERS:
        raise SettingsError(
            f"setting lora.rank: engine {settings.engine.name!r} does not serve adapters; use {' or '.join(SERVE_ADAPTERS)}"
        )
    if settings.colocated.enabled and settings.engine.name not in CAN_SLEEP:
        raise SettingsError(f"setting colocated.enabled: engine {settings.engine.name!r} cannot sleep; use {' or '.join(CAN_SLEEP)}")
    if settings.colocated.enabled and settings.services.pool:
        raise SettingsError("settings colocated.enabled and services.pool exclude each other: engines that share a GPU are of one kind")
    checked_name(settings.weights.transport, TRANSPORTS, "setting weights.transport:")
    for dotted, (low, high) in RANGES.items():
        section, key = dotted.split(".")
        value = getattr(getattr(settings, section), key)
        if not low <= value <= high:
            raise SettingsError(f"setting {dotted}: {value} is not between {low:g} and {high:g}")
    check_pool(settings.services.pool, settings.engine)
    check_gpus(settings.services, settings.parallel.world_size, settings.engine.tensor_parallel_size)
    check_shared(settings)
    if settings.services.pool and settings.services.rollouts != 1:
        raise SettingsError("settings services.pool and services.rollouts exclude each other: give one")
    if settings.model.path and settings.model.scratch:
        raise SettingsError("settings model.path and model.scratch exclude each other: give one")
    if settings.model.path and not (settings.model_dir / "config.json").is_file():
        raise SettingsError(f"setting model.path: no config.json in {settings.model_dir}; give a Hugging Face model directory")
