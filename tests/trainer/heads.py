"""Makes draft heads of random weights for tests, and trains them on texts that their target draws."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rollout.engines.contract.models import VOCAB
from tests.contracts.engine_draft_models import write_eagle
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.registry import make_backend, make_draft_training
from trainer.roles.drafts import DraftTraining
from trainer.roles.models import RankModels

ALGORITHM = make_algorithm(AlgorithmConfig())
ROUNDS = 30
"""Batches of texts after which a head drafts nearly half of all tokens."""


def write_random_head(target: PreTrainedModel, directory: Path) -> Path:
    """Write an EAGLE head of random weights, which drafts nothing that the target says; return its place."""
    place = Path(write_eagle(target, directory))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.ones_like(it) if it.ndim == 1 else it.normal_(0, 0.02, generator=generator)
        for name, it in load_file(place / "model.safetensors").items()
    }
    save_file(tensors, place / "model.safetensors")
    return place


def make_models(name: str, model_dir: Path, head_dir: Path, lr: float = 1e-2) -> RankModels:
    """Models of a backend with a head."""
    policy = make_backend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        trainer=TrainerConfig(backend=name, device="cpu", micro_batch_tokens=256),
        algorithm=ALGORITHM,
    )
    drafts = make_draft_training(policy, head_dir, lr)
    return RankModels(policy, drafts=drafts, algorithm=ALGORITHM)


@torch.no_grad()
def texts(model: PreTrainedModel, seed: int, samples: int = 16) -> Batch:
    """Return samples of a step that the model has drawn, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (samples, 3), generator=generator)
    for _ in range(40):
        scores = model(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(scores, 1, generator=generator)], dim=1)
    groups = [
        (
            scored(
                GroupSpec(
                    group=i, prompt=row[:3], samples=[SampleSpec(row[3 : 12 + 2 * i], [0] * (9 + 2 * i))]
                )
            ),
            1,
        )
        for i, row in enumerate(tokens.tolist())
    ]
    return batch_of(groups, step=seed, algorithm=ALGORITHM)


def learnt(drafts: DraftTraining, batch: Batch) -> float | None:
    """Make all updates with a batch; returns the mean loss of those before."""
    loss = drafts.join(batch)
    while drafts.left:
        drafts.update()
    return loss
