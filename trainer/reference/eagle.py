"""Trains an EAGLE head on the hidden states of the policy (Li et al. 2024, arXiv 2401.15077).

Shapes: n samples of at most L tokens, t tokens of a batch, k trained positions, h elements of a state, V
vocabulary.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from protocol.weights.draft_head import PREFIX
from trainer.backends.base import Backend
from trainer.backends.last_states import LastStates
from trainer.batch import Batch
from trainer.config import OptimizerConfig
from trainer.reference.logprobs import padded
from trainer.reference.optimizer_step import MasterStepper
from trainer.reference.state import copy_state, load_state
from trainer.roles.drafts import DraftTraining
from trainer.storage.host_state import HostCopies, HostState

log = logging.getLogger("tether.trainer")

UPDATE_TOKENS = 512
"""Token limit of an update with several samples, for which a step may have to wait; also the limit of
positions in any update, whose logits need memory."""
PASSES = 2
"""Maximum number of updates per sample; low, to avoid overfitting to the few texts of one step."""
LOGITS_WEIGHT = 0.1
"""Weight of the logits in the loss, as in the paper."""
IDENTITY = {"backend": "draft_head"}
"""Identifies the writer of a checkpoint."""
HEAD, TRAINING = "draft_head", "draft_training"
"""Directories in a checkpoint: the published head in the format of `engine.draft_model`, and the training
state."""


class EagleHead(torch.nn.Module):
    """Head of vLLM's method `eagle`: a linear layer, then a Llama layer without its input norm."""

    def __init__(self, directory: Path) -> None:
        """Load the head from a directory, in float32."""
        super().__init__()
        config = LlamaConfig.from_pretrained(directory)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):  # draw no random numbers
            self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            self.layers = torch.nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = torch.nn.Identity()
        self._rotary = LlamaRotaryEmbedding(config)
        tensors = {
            k: v.float() for file in directory.glob("*.safetensors") for k, v in load_file(file).items()
        }
        self.load_state_dict(tensors, assign=True)

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the next states after `states`, [n, L, h], given the embeddings of the next tokens."""
        joined = self.fc(torch.cat([embeddings, states], dim=-1))
        places = self._rotary(joined, torch.arange(joined.shape[1], device=joined.device)[None])
        drafted: torch.Tensor = self.layers[0](joined, position_embeddings=places)
        return drafted


def eagle_loss(drafted: torch.Tensor, states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the mean of SmoothL1(states, drafted) + 0.1 CE(softmax(states O'), softmax(drafted O')).

    Args:
        drafted: [k, h], states predicted by the head.
        states: [k, h], states of the policy.
        output: O [V, h], weight of the policy's output layer.
    """
    target = (states @ output.T).softmax(-1)
    return F.smooth_l1_loss(drafted, states) + LOGITS_WEIGHT * F.cross_entropy(drafted @ output.T, target)


class EagleTraining(DraftTraining):
    """Training of a float32 EAGLE head with AdamW."""

    def __init__(self, directory: Path, lr: float, policy: Backend) -> None:
        """Load the head from a directory.

        Args:
            directory: directory in vLLM's format.
            lr: learning rate.
            policy: backend that computes the hidden states.
        """
        self._policy, self._device = policy, policy.device
        self._config = (directory / "config.json").read_text()
        self._head = EagleHead(directory).to(self._device)
        masters = dict(self._head.named_parameters())
        self._stepper = MasterStepper(masters, masters, OptimizerConfig(lr=lr), ())
        self.published: dict[str, torch.Tensor] = {
            PREFIX + name: master.detach().clone() for name, master in masters.items()
        }
        self._copies = HostCopies()
        self._batch: Batch | None = None
        self.left: list[int] = []
        self._losses: list[float] = []

    def join(self, batch: Batch) -> float | None:
        for name, master in self._stepper.masters.items():
            self.published[PREFIX + name].copy_(master.detach())
        order, self._batch = torch.Generator().manual_seed(batch.step), batch
        passes = [torch.randperm(len(batch.lengths), generator=order) for _ in range(PASSES)]
        self.left = torch.cat(passes).tolist()
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None

    def update(self) -> None:
        if self._batch is None:
            raise RuntimeError("update before join: there is nothing to learn from")
        lengths, samples = self._batch.lengths, [self.left.pop()]
        while self.left and int(lengths[[*samples, self.left[-1]]].sum()) <= UPDATE_TOKENS:
            samples.append(self.left.pop())
        part = self._batch.select(torch.tensor(samples))
        try:
            loss = self._loss(part.to(self._device), self._policy.last_states(part))
            if loss is not None:
                loss.backward()
        except torch.OutOfMemoryError as error:
            log.warning("draft_head.out_of_memory tokens=%d cause=%s", len(part.tokens), error)
            self._stepper.zero_grad()
            self.left = [sample for sample in self.left if sample not in samples]
            return
        if loss is not None:
            self._stepper.step()
            self._losses.append(float(loss.detach()))

    def copy_parts(self) -> Mapping[str, HostState]:
        head = self._copies.copy_all((name.removeprefix(PREFIX), it) for name, it in self.published.items())
        return {
            HEAD: HostState({"model.safetensors": head}, texts={"config.json": self._config}),
            TRAINING: copy_state(self._copies, self._stepper, IDENTITY, self._device),
        }

    def restore_parts(self, checkpoint: Path) -> None:
        self._batch, self.left, self._losses = None, [], []  # from steps after the checkpoint
        if not (checkpoint / HEAD).is_dir():
            log.warning("checkpoint.no_draft_head directory=%s", checkpoint)
            return
        load_state(checkpoint / TRAINING, self._stepper, IDENTITY, self._device)
        for name, tensor in load_file(checkpoint / HEAD / "model.safetensors").items():
            self.published[PREFIX + name].copy_(tensor)

    def _loss(self, part: Batch, found: LastStates) -> torch.Tensor | None:
        """Return the loss over the states from which tokens were sampled; None without such states."""
        tokens, sample, position = padded(part)
        states = found.states.new_zeros(*tokens.shape, found.states.shape[-1], dtype=torch.float32)
        states[sample, position] = found.states.float()
        sampled = torch.zeros_like(tokens, dtype=torch.bool)
        sampled[sample, position] = part.sampled_mask
        learnt = sampled[:, 2:]  # the first predictable state is the one that predicts the third token
        places = learnt.nonzero()
        if not len(places):
            return None
        rows, columns = places[:: -(-len(places) // UPDATE_TOKENS)].T
        embeddings = F.embedding(tokens[:, 1:-1], found.embedding).float()
        drafted = self._head(states[:, 1:-1], embeddings)
        return eagle_loss(drafted[rows, columns], states[:, 2:][rows, columns], found.output.float())
