"""Makes the steps of PPO that backends are compared in, and the models that make them."""

from pathlib import Path

import torch

from protocol.codec import encode_payload
from tests.trainer.commands import train_command
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.registry import make_backend, make_critic
from trainer.roles.config import CriticConfig
from trainer.roles.models import RankModels
from trainer.step.train_command import TrainCommand

STEPS, BOUND, VOCABULARY = (2, 3, 4), 1, 96
ALGORITHM = AlgorithmConfig(name="ppo", gamma=0.97, gae_lambda=0.9, entropy_coef=0.01)
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5, adam_eps=1e-3)
CRITIC = CriticConfig(lr=3e-3, lr_warmup_steps=2, weight_decay=0.05, clip_grad=2.0, value_clip=0.1)


def command(step: int) -> TrainCommand:
    """Groups of one and three samples, with lags of 0 to 2, inserted tokens, and a sample that is late."""
    generator = torch.Generator().manual_seed(step)
    records = []
    for group, sizes in enumerate(((7,), (1, 5, 6), (2, 4))):
        samples = []
        for number, size in enumerate(sizes):
            lags = sorted(torch.randint(0, 3, (size,), generator=generator).tolist(), reverse=True)
            lags = [2] * size if (group, number) == (2, 0) else lags
            samples.append(
                SampleSpec(
                    torch.randint(0, VOCABULARY, (size,), generator=generator).tolist(),
                    [step - lag for lag in lags],
                    reward=float(torch.randn((), generator=generator)),
                    mask=[int(place != 2) for place in range(size)],
                    logprobs=(-4.5 + 0.5 * torch.randn(size, generator=generator)).tolist(),
                )
            )
        prompt = torch.randint(0, VOCABULARY, (3 + group,), generator=generator).tolist()
        records.append(encode_payload(scored(GroupSpec(group=group, prompt=prompt, samples=samples))))
    return train_command(step, records, bound=BOUND, temperature=0.8)


def make_models(
    backend: str,
    model_dir: Path,
    *,
    parallel: ParallelConfig | None = None,
    critic_dir: Path | None = None,
    critic: CriticConfig = CRITIC,
    algorithm: AlgorithmConfig = ALGORITHM,
    dtype: str = "float32",
) -> RankModels:
    trainer = TrainerConfig(
        backend=backend, device="cpu", dtype=dtype, micro_batch_tokens=24, micro_batch_size=3
    )
    policy = make_backend(
        model_dir,
        parallel=parallel or ParallelConfig(),
        optimizer=OPTIMIZER,
        trainer=trainer,
        algorithm=make_algorithm(algorithm),
    )
    made = make_critic(policy, critic_dir or model_dir, optimizer=OPTIMIZER, trainer=trainer, config=critic)
    return RankModels(policy, critic=made, algorithm=make_algorithm(algorithm))
