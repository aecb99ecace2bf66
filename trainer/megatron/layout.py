"""Says which rank has which part of a model: pure numbers, no torch.

Ranks of a pipeline stage are numbered in megatron's order: the tensor rank varies fastest, then the context
rank, then the data-parallel one; stages follow each other. Experts divide the same ranks of a stage another
way: the expert-tensor rank varies fastest, then the expert-parallel one; what is left are copies.
"""

from dataclasses import dataclass

from protocol.errors import SettingsError
from trainer.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Grid:
    """Over how many ranks a parameter is split: a number of a rank in it is `tensor + tp * expert`."""

    tp: int = 1
    """Ranks that have parts of each matrix."""
    ep: int = 1
    """Ranks that have different experts; 1 for what is not an expert's."""
    setting: str = "tensor_model_parallel_size"
    """What sets `tp`, for errors."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a rank. All numbers count from 0."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0
    """Pipeline stage."""
    etp: int = 0
    """Tensor rank among those that share an expert."""
    ep: int = 0
    """Which experts it has."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a layout, and the layers of every part of the pipeline."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    stages: tuple[tuple[range, ...], ...] = ((range(0),),)
    """For each pipeline stage its model chunks, for each chunk its layers. Chunk c of every stage comes
    before chunk c + 1 of any."""

    @classmethod
    def of(cls, parallel: ParallelConfig, layers: int) -> "Layout":
        """Lay out a model of so many layers.

        Raises:
            SettingsError: the layers, or the ranks of a stage, cannot be divided so.
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
        """Pipeline stages."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """Model chunks of a stage: the virtual pipeline's size."""
        return len(self.stages[0])

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.cp * self.dp

    @property
    def ranks(self) -> int:
        """Ranks of all stages."""
        return self.stage_ranks * self.pp

    def grid(self, *, expert: bool) -> Grid:
        """Return over what an expert's parameters, or those of everything else, are split."""
        return Grid(self.etp, self.ep, "expert_tensor_parallel_size") if expert else Grid(self.tp)

    def rank_of(self, tp: int, pp: int, dp: int = 0, cp: int = 0) -> int:
        """Return the global rank at a place."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def place_of(self, rank: int) -> Place:
        """Return the place of a global rank."""
        pp, inside = divmod(rank, self.stage_ranks)
        outer, tp = divmod(inside, self.tp)
        dp, cp = divmod(outer, self.cp)
        return Place(tp, cp, dp, pp, inside % self.etp, inside // self.etp % self.ep)

    def number_of(self, place: Place, *, expert: bool) -> int:
        """Return a rank's number in the grid of experts, or in that of everything else."""
        return place.etp + self.etp * place.ep if expert else place.tp

    def holder_of(self, stage: int, number: int) -> int:
        """Return the first global rank of a stage with this number in a grid; the others are its copies.

        It is the same for both grids: in both, the first ranks of a stage are numbered from 0.
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
    pp = parallel.pipeline_model_parallel_size
    if layers % pp:
        raise SettingsError(
            f"pipeline_model_parallel_size = {pp} does not divide the model's {layers} layers: "
            "choose a divisor"
        )
    each = layers // pp
    return tuple((range(stage * each, (stage + 1) * each),) for stage in range(pp))
