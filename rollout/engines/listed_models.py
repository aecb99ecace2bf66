"""Parses the supported architectures of an engine from its source, without importing the library."""

import ast
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VLLM = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Names of vLLM's tables of text generation models."""
SGLANG = re.compile(r"^EntryClass(?:: [^=]+)? = (\[[^\]]*\]|\w+)", re.MULTILINE)
"""Statement in a SGLang module that lists its model classes."""


def listed_architectures(engine: str, place: Path | None = None) -> frozenset[str]:
    """Return the architectures listed by an engine's library; empty if not installed or without a list.

    Args:
        engine: vllm or sglang.
        place: package directory of the library; None: search this interpreter's path.
    """
    if place is None:
        spec = find_spec(engine)
        place = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else None
    return frozenset(READERS[engine](place)) if place else frozenset()


def engines_with(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return installed engine -> whether it lists an architecture of config.json."""
    tables = {engine: listed_architectures(engine) for engine in READERS}
    names = {*(config.get("architectures") or ())}
    return {engine: bool(names & table) for engine, table in tables.items() if table}


def _read_vllm(place: Path) -> set[str]:
    path = place / "model_executor/models/registry.py"
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and named in VLLM:
            found |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return found


def _read_sglang(place: Path) -> set[str]:
    texts = (path.read_text() for path in (place / "srt/models").glob("*.py"))
    return {
        name
        for text in texts
        for classes in SGLANG.findall(text)
        for name in re.findall(r"\w+", re.sub(r"#.*", "", classes))
    }


READERS: Mapping[str, Callable[[Path], set[str]]] = {"vllm": _read_vllm, "sglang": _read_sglang}
