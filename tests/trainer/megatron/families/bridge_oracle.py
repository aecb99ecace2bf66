"""Converts checkpoints with NVIDIA's megatron-bridge, on one rank, and writes the parameters that it makes.

    .venv-bridge/bin/python tests/trainer/megatron/convert/bridge_oracle.py OUT_DIR MODEL_DIR...

A line of standard output names each model that it could not convert, and why. It runs in an environment of
its own (`make test-slow` builds it), with another version of megatron-core, and imports nothing of tether.
What it converts with is the bridge's; what is made here is only a model of Megatron's local layers on a CPU,
and stand-ins for libraries that are imported and not used.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from safetensors.torch import save_file

KERNELS = frozenset(
    {"transformer_engine", "transformer_engine_torch", "flashinfer", "fast_hadamard_transform", "mamba_ssm"}
    | {"causal_conv1d", "diffusers", "modelopt", "nvidia_resiliency_ext"}
)
"""Imported by the bridge. megatron-core has to find out before that they are not there."""
OFF = (
    "gradient_accumulation_fusion", "bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion",
    "apply_rope_fusion", "persist_layer_norm", "moe_permute_fusion", "moe_router_fusion", "moe_grouped_gemm",
    "cross_entropy_loss_fusion", "bf16", "fp16", "should_pad_vocab", "moe_shared_expert_overlap",
    "layernorm_zero_centered_gamma",
)  # fmt: skip


class Anything(type):
    """A class whose attributes are classes of the same kind, as a base for classes that nobody makes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (torch.nn.Module,), {})


class StandIn(types.ModuleType):
    """A module that has whatever is imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (torch.nn.Module,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for the packages of kernels."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        known = name.partition(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        module.__version__ = "3.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_bridge() -> Any:
    if not hasattr(typing, "override"):  # Python 3.12 has it
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    from megatron.core.extensions import transformer_engine

    assert not transformer_engine.HAVE_TE
    sys.meta_path.append(Finder())
    from megatron.bridge import AutoBridge

    return AutoBridge


def initialize() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(1, 1)


def configure(provider: Any) -> None:
    """Ask for Megatron's own layers, in float32, on a CPU."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection

    for name in OFF:
        setattr(provider, name, False)
    provider.use_cpu_initialization, provider.params_dtype = True, torch.float32
    provider.transformer_impl = "local"
    provider.attention_dropout = provider.hidden_dropout = 0.0
    if getattr(provider, "num_moe_experts", None):
        provider.moe_token_dispatcher_type = "allgather"
        provider.transformer_layer_spec = lambda config, vp_stage=None: (
            gpt_layer_specs.get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization
            )
        )
    else:
        provider.transformer_layer_spec = lambda config, vp_stage=None: (
            gpt_layer_specs.get_gpt_layer_local_spec(
                qk_layernorm=config.qk_layernorm, normalization=config.normalization
            )
        )
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # set for the model before
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()


def converted(bridge_class: Any, model_dir: str) -> dict[str, torch.Tensor]:
    """Return the parameters of a model that the bridge has loaded, by their names in Megatron."""
    bridge = bridge_class.from_hf_pretrained(model_dir, torch_dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=False)
    configure(provider)
    model = provider.provide(pre_process=True, post_process=True).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # what is not loaded equals nothing
    bridge.load_hf_weights([model])
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def main() -> None:
    out, *model_dirs = sys.argv[1:]
    bridge_class = import_bridge()
    initialize()
    for model_dir in model_dirs:
        try:
            found = converted(bridge_class, model_dir)
        except Exception as error:
            print(f"{os.path.basename(model_dir)}: {type(error).__name__}: {error}", flush=True)
            continue
        save_file(found, os.path.join(out, f"{os.path.basename(model_dir)}.safetensors"))


if __name__ == "__main__":
    main()
