"""Reading config.json, and refusing fields of another type or absent ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from tests.trainer.megatron.models import make_model
from trainer.megatron.families.config_file import read_config
from trainer.megatron.families.reading import read_architecture


def write_config(directory: Path, **changes: object) -> Path:
    config = make_model("llama").config.to_dict() | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("text", ["[]", "{", "5"])
def test_a_file_without_an_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingsError, match=r"config\.json.*Hugging Face checkpoint"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("model_type", ["llama"], "a string"),
        ("num_attention_heads", "8", "a number"),
        ("sliding_window", {}, "a number"),
        ("layer_types", 3, "a list"),
        ("rope_parameters", "default", "an object"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, field: str, value: Any, kind: str) -> None:
    with pytest.raises(SettingsError, match=rf"config\.json: {field} = .* must be {kind}"):
        read_architecture(write_config(tmp_path, **{field: value}))


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "rms_norm_eps"])
def test_an_absent_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(SettingsError, match=f"lacks what a model needs: {field}"):
        read_architecture(write_config(tmp_path, **{field: None}))
