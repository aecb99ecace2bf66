"""Settings of a process: defaults < TOML or JSON file < `TETHER_*` variables < `--set a.b=c`.

Each component's section is a frozen dataclass beside the component; this module composes them and nothing
more. A variable is named `TETHER_SECTION__KEY`; the ones that people set most have short names
(`SHORT_NAMES`). An unknown key fails and names its neighbour.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict

from protocol.staleness import Bound, Policy
from protocol.weights.lora import LoraConfig
from reward.config import RewardConfig
from rollout.engines.base import EngineConfig
from rollout.environments.base import EnvironmentConfig
from rollout.generate import SamplingConfig
from rollout.prompts.base import PromptConfig
from rollout.render import RenderConfig
from services.bus.config import BusConfig
from services.ledger.interface import ARCHIVE_LIMIT
from services.settings.placement import ServicesConfig
from trainer.config import (
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
    """redis:// or rediss:// URL; empty: an embedded server in the run directory. Set it by TETHER_REDIS_URL,
    not on a command line."""
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
class ColocatedConfig:
    """Section `[colocated]`: trainer and engines share their GPUs by turns."""

    enabled: bool = False
    wait_s: float = 300.0
    """How long the trainer waits for engines to sleep (one that starts or stages ends that first), and an
    engine for others to leave the device in the engines' turn, before it gives up."""


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
        """Where the initial model lies: the user's directory, or the one made from scratch in the run
        directory."""
        return Path(self.model.path).absolute() if self.model.path else self.run_dir / "model"
