"""Tests that what the backward pass computes again changes neither loss nor gradient."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from protocol.errors import SettingsError
from tests.trainer.megatron.models import save_model
from trainer.config import TrainerConfig
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.layers.attention.rotary import packed_sequences
from trainer.megatron.layers.experts.balance import routed_tokens
from trainer.megatron.layers.experts.router import ExpertRouter
from trainer.megatron.layout import Layout
from trainer.megatron.model import build_model, transformer_config
from trainer.megatron.optimizer import wrap_model
from trainer.megatron.parallel import Position
from trainer.megatron.part import keep_input_gradient, set_recompute

SETTINGS: dict[str, dict[str, object]] = {
    "full-uniform": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "full-block": {"recompute_granularity": "full", "recompute_method": "block"},
    "selective": {"recompute_granularity": "selective"},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "all": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3-tied", tmp_path_factory.mktemp("model"))


class Pass:
    """Loss, gradients and kept bytes of one forward and backward pass of a model with random weights."""

    def __init__(
        self, model_dir: Path, position: Position, *, frozen: bool = False, **trainer: object
    ) -> None:
        architecture = read_architecture(model_dir)
        settings = TrainerConfig(**trainer)  # type: ignore[arg-type]
        config = transformer_config(architecture, position, torch.float32)
        config.gradient_accumulation_fusion = False  # there is no wrapper with buffers for gradients
        set_recompute(config, settings, Layout.of(position.config, architecture.layers))
        model = build_model(architecture, config, position)
        keep_input_gradient(model, settings)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        if frozen:
            model.embedding.requires_grad_(False)
        (wrapped,) = wrap_model([model], config, position)  # whose buffers have the gradients
        wrapped.zero_grad_buffer()
        lengths = [16, 16, 12]
        tokens = torch.randint(0, 90, (1, sum(lengths)), generator=generator)
        sequences = packed_sequences(lengths, model.rotaries, torch.float32, segmented=True)
        routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        if routers:
            config.moe_aux_loss_coeff = 0.5
            # Outside of megatron's schedules, which would set it so, it becomes a number that these refuse.
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1)
            owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            places, size = torch.arange(sum(lengths)), sum(lengths)
            routed = routed_tokens(lengths, owners, places, size, len(lengths))
            sequences = replace(sequences, routed=routed)
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = wrapped(tokens, None, None, packed_seq_params=sequences)
            loss = (hidden @ model.output_weight.t()).logsumexp(-1).sum()
        self.kept = sum(kept.values())
        loss.backward()
        self.loss = loss.item()
        self.loads = [router.loads for router in routers]
        self.gradients = {
            name: parameter.main_grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "embedding-frozen"])
def test_recomputing_gives_the_same_gradients_and_keeps_less(
    model_dir: Path, position: Position, name: str, frozen: bool
) -> None:
    plain = Pass(model_dir, position, frozen=frozen)
    again = Pass(model_dir, position, frozen=frozen, **SETTINGS[name])
    modules = TrainerConfig(**SETTINGS[name]).recompute_modules  # type: ignore[arg-type]
    assert again.loss == plain.loss
    for parameter, gradient in plain.gradients.items():
        # a norm that is computed again rounds differently; nothing else does
        tolerance = 5e-7 if "layernorm" in modules else 0
        torch.testing.assert_close(again.gradients[parameter], gradient, atol=tolerance, rtol=0)
    assert again.kept < plain.kept or name == "core_attn"


@pytest.mark.parametrize("name", ["full-uniform", "all"])
def test_experts_that_are_computed_again_get_the_same_gradients_and_count_once(
    tmp_path: Path, position: Position, name: str
) -> None:
    model_dir = save_model("mixtral", tmp_path)
    plain, again = Pass(model_dir, position), Pass(model_dir, position, **SETTINGS[name])
    for parameter, gradient in plain.gradients.items():
        torch.testing.assert_close(again.gradients[parameter], gradient, atol=5e-6, rtol=1e-5)
    assert [load.sum() for load in plain.loads] == [2 * 44, 2 * 44]
    assert all(map(torch.equal, plain.loads, again.loads))
    assert again.kept < plain.kept


def test_layers_that_do_not_divide_are_refused(model_dir: Path, position: Position) -> None:
    with pytest.raises(SettingsError, match=r"recompute_num_layers: 3 does not divide the 2 layers"):
        Pass(model_dir, position, recompute_granularity="full", recompute_num_layers=3)
