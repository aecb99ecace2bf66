"""Tests which kernel computes attention."""

import inspect
import sys
from types import ModuleType

import pytest
import torch

from protocol.errors import SettingsError
from tests.trainer.layers.attention.conftest import Choose
from trainer.config import AttentionBackend
from trainer.layers.attention.kernels import FUSED, by_segments, kernel_for
from trainer.layers.attention.terms import COMPUTED, AttentionTerms

BOUNDED = AttentionTerms(softcap=50.0)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)]
)
def test_without_16_bits_on_cuda_attention_goes_by_segments(device: str, dtype: torch.dtype) -> None:
    assert kernel_for(device, dtype) is by_segments


def test_16_bits_on_cuda_use_the_fused_kernel_of_torch() -> None:
    assert kernel_for("cuda", torch.bfloat16) is FUSED["torch"]


def test_torch_leaves_bounded_scores_to_segments_and_takes_sinks() -> None:
    assert kernel_for("cuda", torch.bfloat16, BOUNDED) is by_segments
    assert kernel_for("cpu", torch.float32, BOUNDED) is by_segments
    assert kernel_for("cuda", torch.bfloat16, AttentionTerms(sinks=True)) is FUSED["torch"]


@pytest.mark.parametrize("name", ["flash_attn", "transformer_engine"])
def test_a_library_is_used_only_when_it_is_chosen(name: AttentionBackend, chosen: Choose) -> None:
    chosen(name)
    assert kernel_for("cuda", torch.bfloat16) is FUSED[name]
    with pytest.raises(SettingsError, match=rf"attention_backend: {name}: it computes on CUDA in 16 bits"):
        kernel_for("cpu", torch.float32)
    chosen("auto")
    assert kernel_for("cuda", torch.bfloat16) is FUSED["torch"]


def test_a_library_below_torch_is_there_as_long_as_it_is_chosen(
    chosen: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = torch.library.Library("flash_attn_3", "FRAGMENT")  # as the library's module registers it
    for operator in ("fwd", "bwd"):
        library.define(f"{operator}(Tensor q) -> Tensor")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    chosen("flash_attn_3")
    assert torch.nn.attention.current_flash_attention_impl() == "FA3"
    assert kernel_for("cuda", torch.bfloat16) is FUSED["torch"]
    with pytest.raises(
        SettingsError, match=r"attention_backend: flash_attn_3: it computes on CUDA in 16 bits"
    ):
        kernel_for("cpu", torch.float32)
    chosen("auto")
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_a_library_below_torch_that_is_not_there_is_named(
    chosen: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(SettingsError, match=r"attention_backend: flash_attn_3: .*flash_attn_interface"):
        chosen("flash_attn_3")
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert kernel_for("cpu", torch.float32) is by_segments


def test_a_library_below_torch_is_refused_on_other_gpus(
    chosen: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(SettingsError, match="it is for GPUs of compute capability 9, this is NVIDIA A100"):
        chosen("flash_attn_3")


def test_a_library_refuses_terms_that_it_does_not_compute(chosen: Choose) -> None:
    chosen("flash_attn")
    assert kernel_for("cuda", torch.bfloat16, BOUNDED) is FUSED["flash_attn"]
    chosen("transformer_engine")
    with pytest.raises(SettingsError, match="it computes no bounded scores; use torch"):
        kernel_for("cuda", torch.bfloat16, BOUNDED)


def test_segments_are_used_on_a_gpu_too_when_they_are_chosen(chosen: Choose) -> None:
    chosen("segments")
    assert kernel_for("cuda", torch.bfloat16) is by_segments


def test_kernels_that_know_sinks_take_them() -> None:
    knowing = [FUSED[name] for name, terms in COMPUTED.items() if "sinks" in terms]
    assert knowing
    assert all("sinks" in inspect.signature(kernel).parameters for kernel in [*knowing, by_segments])
