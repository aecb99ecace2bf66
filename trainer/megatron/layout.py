"""Maps ranks to parts of a model: pure arithmetic, no torch.

Ranks of a pipeline stage are numbered in megatron's order: the tensor rank varies fastest, then the context
rank, then the data-parallel rank. Stages are consecutive. Experts split the same ranks of a stage
differently: the expert-tensor rank varies fastest, then the expert-parallel rank; the remaining factor counts
copies.
"""

from dataclasses import dataclass

from protocol.errors import SettingsError
from trainer.config import ParallelConfig

PIPELINE_ONLY = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
"""Settings that require a pipeline."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks over which a parameter is split. A rank's number in the grid is `tensor + tp * expert`."""

    tp: int = 1
    """Number of ranks that each matrix is split over."""
    ep: int = 1
    """Number of ranks with different experts; 1 for other parameters."""
    setting: str = "tensor_model_parallel_size"
    """Setting of `tp`, for errors."""


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a rank, each starting at 0."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0
    """Pipeline stage."""
    etp: int = 0
    """Tensor rank among the ranks that share an expert."""
    ep: int = 0
    """Expert-parallel rank."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a layout, and the layers of every pipeline stage."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    stages: tuple[tuple[range, ...], ...] = ((range(0),),)
    """Per pipeline stage, the layers of each model chunk. Chunk c of every stage comes before chunk c + 1 of
    any stage."""

    @classmethod
    def of(cls, parallel: ParallelConfig, layers: int) -> "Layout":
        """Lay out a model with `layers` layers.

        Raises:
            SettingsError: the layers or the ranks of a stage cannot be split as configured.
        """
        _check_experts(parallel)
        return cls(
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.data_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.expert_tensor_parallel_size,
            _stages(parallel, layers),
        )

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """Number of model chunks per stage: the size of the virtual pipeline."""
        return len(self.stages[0])

    @property
    def stage_ranks(self) -> int:
        """Number of ranks per stage."""
        return self.tp * self.cp * self.dp

    @property
    def ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.stage_ranks * self.pp

    def grid(self, *, expert: bool) -> Grid:
        """Return the grid over which expert parameters, or all other parameters, are split."""
        return Grid(self.etp, self.ep, "expert_tensor_parallel_size") if expert else Grid(self.tp)

    def rank_of(self, tp: int, pp: int, dp: int = 0, cp: int = 0) -> int:
        """Return the global rank at the given coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def place_of(self, rank: int) -> Place:
        """Return the coordinates of a global rank."""
        pp, inside = divmod(rank, self.stage_ranks)
        outer, tp = divmod(inside, self.tp)
        dp, cp = divmod(outer, self.cp)
        return Place(tp, cp, dp, pp, inside % self.etp, inside // self.etp % self.ep)

    def number_of(self, place: Place, *, expert: bool) -> int:
        """Return a rank's number in the grid of experts or of the other parameters."""
        return place.etp + self.etp * place.ep if expert else place.tp

    def holder_of(self, stage: int, number: int) -> int:
        """Return the first global rank of a stage with `number` in a grid. Other such ranks hold copies.

        The result is the same for both grids, because both number the first ranks of a stage from 0.
        """
        return stage * self.stage_ranks + number


def _check_experts(parallel: ParallelConfig) -> None:
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    ranks = parallel.world_size // parallel.pipeline_model_parallel_size
    if ranks % (ep * etp):
        raise SettingsError(
            f"expert_model_parallel_size = {ep} times expert_tensor_parallel_size = {etp} does not divide "
            f"the {ranks} ranks of a pipeline stage (tensor x context x data): choose divisors"
        )


def _stages(parallel: ParallelConfig, layers: int) -> tuple[tuple[range, ...], ...]:
    """Return the layers of every chunk of every stage, assigned chunk by chunk, then stage by stage."""
    vpp = parallel.virtual_pipeline_model_parallel_size
    sizes = _layers_of_stages(parallel, layers)
    for stage, size in enumerate(sizes):
        if size % vpp:
            raise SettingsError(
                f"virtual_pipeline_model_parallel_size = {vpp} does not divide the {size} layers of pipeline "
                f"stage {stage}: choose a divisor"
            )
    chunks, start = [], 0
    for _ in range(vpp):
        chunk = []
        for size in sizes:
            chunk.append(range(start, start + size // vpp))
            start = chunk[-1].stop
        chunks.append(chunk)
    return tuple(zip(*chunks, strict=True))


def _layers_of_stages(parallel: ParallelConfig, layers: int) -> list[int]:
    """Return the number of layers per stage: first and last as configured, equal numbers for the others."""
    pp = parallel.pipeline_model_parallel_size
    for name in PIPELINE_ONLY:
        if pp == 1 and (value := getattr(parallel, name)) != getattr(ParallelConfig(), name):
            raise SettingsError(
                f"{name} = {value} with pipeline_model_parallel_size = 1: there is one stage, which has all "
                f"{layers} layers; remove the setting, or use more stages"
            )
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    between = pp - bool(first) - bool(last)
    rest = layers - first - last
    if between and rest > 0 and rest % between == 0:
        middle = [rest // between] * between
    elif not between and rest == 0:
        middle = []
    else:
        raise SettingsError(_refusal(parallel, layers, between))
    return [first] * bool(first) + middle + [last] * bool(last)


def _refusal(parallel: ParallelConfig, layers: int, between: int) -> str:
    pp = parallel.pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if not first and not last:
        return (
            f"pipeline_model_parallel_size = {pp} does not divide the model's {layers} layers: choose a "
            "divisor, or set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    names = ("num_layers_in_first_pipeline_stage", first), ("num_layers_in_last_pipeline_stage", last)
    stated = " and ".join(f"{name} = {value}" for name, value in names if value)
    remedy = f"leave a multiple of {between}" if between else f"their sum must be {layers}"
    return (
        f"{stated} of the model's {layers} layers leave {layers - first - last} to the {between} other "
        f"pipeline stages: {remedy}"
    )
