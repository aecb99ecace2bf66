"""Selects vLLM's speculative method for a draft model, and refuses models that do not fit the target.

Drafts come from an EAGLE or EAGLE3 head, a small model, or the multi-token prediction (MTP) layers of the
target's checkpoint. vLLM is not imported.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.device.checkpoint_shapes import tensor_shapes
from protocol.errors import EngineSettingsError, SettingsError
from protocol.weights.draft_head import head_shapes
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.requests import read_config

HISTORY = {
    "history": "rollout.engines.vllm.drafts.history.HistoryDrafts",
    "history_always": "rollout.engines.vllm.drafts.history.ConstantDrafts",
}
"""`engine.drafts` -> class of the proposer in vLLM's model runner."""
MODELS = ("model", "model_always")
"""Values of `engine.drafts` that use a draft model."""
FURTHER_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of config.json, by model family, with the number of MTP layers."""
TAKEN_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
"""Path substrings that make vLLM misclassify a small model or MTP layers as another kind of draft."""
_FURTHER = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Shapes = Mapping[str, tuple[int, ...]]


def draft_arguments(config: EngineConfig, model_dir: Path) -> dict[str, Any]:
    """Return vLLM's AsyncEngineArgs for drafting; empty if drafting is off.

    Args:
        model_dir: directory of the target model.

    Raises:
        EngineSettingsError: see `check_draft_model`.
    """
    if config.drafts == "off":
        return {}
    method: dict[str, Any] = {"num_speculative_tokens": config.num_speculative_tokens}
    if config.drafts not in MODELS:
        return {"speculative_config": {**method, "method": "custom_class", "model": HISTORY[config.drafts]}}
    method |= {"method": method_of(config, read_config(model_dir), model_dir)}
    if config.draft_model:
        method |= {"model": config.draft_model}
    if config.drafts == "model_always":
        return {"speculative_config": method}
    lengths = [(1, config.max_running, config.num_speculative_tokens)]
    return {"speculative_config": {**method, "num_speculative_tokens_per_batch_size": lengths}}


def check_draft_model(
    config: EngineConfig, model: Mapping[str, Any], model_dir: Path, lora: LoraConfig = NO_ADAPTERS
) -> None:
    """Check that vLLM can draft with the configured draft model.

    Args:
        model: config.json of the target model.
        model_dir: directory of the target model.
        lora: adapter of the target, if any.

    Raises:
        EngineSettingsError: the draft model does not fit; the message names the setting and the reason.
    """
    if config.drafts not in MODELS:
        return
    if lora.rank:
        raise EngineSettingsError(
            f"setting engine.drafts: {config.drafts!r} drafts by a model that knows no adapter, and "
            "lora.rank asks for one; use 'history', or set it to 'off'"
        )
    if not any(model_dir.glob("*.safetensors")):
        raise EngineSettingsError(
            f"setting engine.drafts: {model_dir} holds no safetensors, and vLLM loads the model that drafts "
            "as it loads the target: not at all; use 'history', or set it to 'off'"
        )
    method, place = method_of(config, model, model_dir), config.draft_model or str(model_dir)
    taken = next((name for name in TAKEN_NAMES if name in place.lower()), "")
    if taken and method in ("mtp", "draft_model"):
        setting = "engine.draft_model" if config.draft_model else "engine.drafts"
        raise EngineSettingsError(
            f"setting {setting}: vLLM takes {place} for another kind of draft, because {taken!r} is in its "
            "path; rename the directory"
        )


def method_of(config: EngineConfig, model: Mapping[str, Any], model_dir: Path) -> str:
    """Return vLLM's method name: mtp, eagle, eagle3 or draft_model.

    Raises:
        EngineSettingsError: the draft model does not fit the target; the message contains the reason.
    """
    if not config.draft_model:
        _check_further_layers(config, model, model_dir)
        return "mtp"
    place = Path(config.draft_model)
    try:
        draft, shapes = read_config(place), tensor_shapes(place)
    except (EngineSettingsError, SettingsError) as error:
        raise EngineSettingsError(f"setting engine.draft_model: {error}") from error
    draft |= draft.get("transformer_layer_config") or {}  # format of the library speculators
    method = _method(shapes)
    heads = int(draft.get("num_attention_heads") or 0)
    vocabularies = draft.get("vocab_size"), model.get("vocab_size")
    if not method:
        why = "it holds no safetensors"
    elif vocabularies[0] != vocabularies[1]:
        why = f"its vocabulary has {vocabularies[0]} tokens, and the one of {model_dir} {vocabularies[1]}"
    elif heads % config.tensor_parallel_size:
        why = f"engine.tensor_parallel_size {config.tensor_parallel_size} does not divide its {heads} heads"
    else:
        why = _why_no_head(method, draft, shapes, model, model_dir)
        why = why or _why_untrained(config, method, draft, shapes)
    if why:
        raise EngineSettingsError(
            f"setting engine.draft_model: {place} cannot draft for this model: {why}; name an EAGLE or "
            "EAGLE3 head of this model, or a small model of its vocabulary"
        )
    return method


def _method(shapes: Shapes) -> str:
    """Return the draft method according to the tensor names; empty if there are none."""
    names = {name.removeprefix("model.") for name in shapes}
    if any(name.endswith(".hidden_norm.weight") for name in names):  # norm of the target's hidden states
        return "eagle3"
    if "fc.weight" in names:  # projection of hidden states and embeddings
        return "eagle"
    return "draft_model" if names else ""


def _why_no_head(
    method: str, draft: Mapping[str, Any], shapes: Shapes, model: Mapping[str, Any], model_dir: Path
) -> str:
    """Return why a head cannot read the target's hidden states; empty if it can or the draft is no head."""
    if method == "draft_model":
        return ""
    hidden, expected = int(draft.get("hidden_size") or 0), int(model.get("hidden_size") or 0)
    read = int(draft.get("target_hidden_size") or hidden)
    if read != expected or (method == "eagle" and hidden != expected):
        return f"it reads hidden states of {read} elements, and the ones of {model_dir} have {expected}"
    joined = shapes.get("fc.weight") or shapes.get("model.fc.weight") or (hidden, 0)
    if joined[0] != hidden or joined[-1] % expected or (method == "eagle" and joined[-1] != 2 * expected):
        return f"its fc.weight is {list(joined)}, by its config.json hidden states have {expected} elements"
    return ""


def _why_untrained(config: EngineConfig, method: str, draft: Mapping[str, Any], shapes: Shapes) -> str:
    """Return why a draft is not a trainable head; empty if it is, or if training is off."""
    if not config.trained_head:
        return ""
    if method != "eagle" or draft.get("model_type") != "llama":
        return "engine.draft_lr trains an EAGLE head of model_type llama alone"
    expected = head_shapes(draft)
    wrong = next((n for n in sorted(expected.keys() | shapes.keys()) if expected.get(n) != shapes.get(n)), "")
    if wrong:
        sizes = (list(its[wrong]) if wrong in its else "absent" for its in (shapes, expected))
        return "engine.draft_lr trains a head of one layer: {} is {}, and must be {}".format(wrong, *sizes)
    return ""


def _check_further_layers(config: EngineConfig, model: Mapping[str, Any], model_dir: Path) -> None:
    """Refuse a checkpoint without MTP layers, and draft lengths that they cannot produce."""
    count = next((int(model[field]) for field in FURTHER_LAYERS if model.get(field)), 0)
    layers = int(model.get("num_hidden_layers") or 0)
    names = tensor_shapes(model_dir) if count else {}
    further = (
        _FURTHER.match(name) or ((layer := _LAYER.match(name)) and int(layer[1]) >= layers) for name in names
    )
    if not any(further):
        raise EngineSettingsError(
            f"setting engine.drafts: {model_dir} has no layers that predict further tokens (MTP); name a "
            "draft head or a small model in engine.draft_model, or use 'history'"
        )
    if config.num_speculative_tokens > count and config.num_speculative_tokens % count:
        raise EngineSettingsError(
            f"setting engine.num_speculative_tokens: {config.num_speculative_tokens} is not a multiple of "
            f"the {count} layers of {model_dir} that predict further tokens, which take turns"
        )
