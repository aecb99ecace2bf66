"""Tests which places of versions exclude which engines, transports and adapters."""

import pytest

from protocol.errors import SettingsError
from services.rollout.service import _engine_config
from services.settings.checks import settings_errors
from services.settings.load import load_settings
from trainer.config import WeightConfig
from trainer.recipe import check_files

SHARED = ("engine.name=hf", "trainer.backend=reference", "weights.transport=shared")


def refusals(*overrides: str) -> list[str]:
    """Return the reasons why settings are refused that speak of staging."""
    try:
        settings = load_settings(overrides=overrides, environ={})
    except SettingsError as error:
        return [str(error)]
    return [str(error) for error in settings_errors(settings) if ".staging" in str(error)]


@pytest.mark.parametrize("transport", ["ipc", "nccl", "shared"])
def test_layers_are_refused_where_a_version_is_sent_once(transport: str) -> None:
    (found, *_) = refusals("engine.staging=layers", *SHARED, f"weights.transport={transport}")
    assert found == (
        "setting engine.staging: 'layers' reads a version twice, and weights.transport "
        f"{transport!r} sends it once; use 'host', or weights.transport disk or http or shm"
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("engine.staging=host", "engine.name=sglang_jax"), "engine 'sglang_jax' stages on the device alone"),
        (("engine.staging=layers", "engine.name=scripted"), "engine 'scripted' stages on the device alone"),
        (("engine.staging=host", *SHARED), "there is no copy to place"),
        (("engine.staging=copy", *SHARED), "there is no copy to place"),
        (("engine.staging=layers", "lora.rank=8"), "only the adapter is staged"),
        (("engine.staging=disk",), "engine.staging"),
        (
            ("services.pool=[{}, {engine = {staging = 'layers'}}]", "weights.transport=nccl"),
            "services.pool.1.engine.staging: 'layers' reads",
        ),
    ],
)
def test_place_that_cannot_be_is_refused_by_name(overrides: tuple[str, ...], words: str) -> None:
    assert any(words in found for found in refusals(*overrides)), refusals(*overrides)


@pytest.mark.parametrize(
    ("place", "transport", "given"),
    [
        ("auto", "nccl", "copy"),
        ("auto", "ipc", "copy"),
        ("auto", "shm", "auto"),
        ("auto", "disk", "auto"),
        ("device", "nccl", "device"),
        ("host", "ipc", "host"),
    ],
)
def test_engine_chooses_among_the_places_that_the_transport_allows(
    place: str, transport: str, given: str
) -> None:
    overrides = (f"engine.staging={place}", f"weights.transport={transport}")
    assert _engine_config(load_settings(overrides=overrides, environ={})).staging == given


@pytest.mark.parametrize("transport", ["ipc", "shared"])
def test_changes_alone_need_a_transport_that_copies_bytes(transport: str) -> None:
    with pytest.raises(SettingsError, match=rf"weights\.delta: weights\.transport '{transport}' sends whole"):
        check_files(WeightConfig(transport=transport, delta=True))
    check_files(WeightConfig(transport=transport))
    check_files(WeightConfig(transport="disk", delta=True))
    check_files(WeightConfig(transport="nccl", delta=True))
    check_files(WeightConfig(transport="http", delta=True, url="memory://run"))
    with pytest.raises(SettingsError, match=rf"weights\.url: .*weights\.transport '{transport}'; use http"):
        check_files(WeightConfig(transport=transport, url="memory://run"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("engine.staging=layers", "weights.transport=disk"),
        ("engine.staging=host", "weights.transport=nccl"),
        ("engine.staging=auto", "weights.transport=nccl"),
        ("engine.staging=copy", "weights.transport=disk"),
        ("engine.staging=auto", "engine.name=sglang_jax"),
        ("engine.staging=auto", "lora.rank=8"),
        ("engine.staging=layers", "engine.name=sglang"),
    ],
)
def test_places_that_can_be_are_not_refused(overrides: tuple[str, ...]) -> None:
    assert refusals(*overrides) == []
