"""Applies a kustomization as `kubectl kustomize` does, as far as those of deploy/k8s need it.

These are resources, JSON patches, images, labels, a namespace and ConfigMaps from files; all else is refused.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

KEYS = {
    "apiVersion", "kind", "namespace", "labels", "resources", "images", "patches", "generatorOptions",
    "configMapGenerator",
}  # fmt: skip
CLUSTER_WIDE = ("Namespace",)


def build(directory: Path) -> list[dict[str, Any]]:
    """Return the objects that a kustomization makes."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    assert set(kustomization) <= KEYS, set(kustomization) - KEYS
    objects: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = directory / name
        objects += build(path) if path.is_dir() else [*yaml.safe_load_all(path.read_text())]
    for made in kustomization.get("configMapGenerator", []):
        assert kustomization["generatorOptions"] == {"disableNameSuffixHash": True}
        data = {name: (directory / name).read_text() for name in made["files"]}
        meta = {"name": made["name"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data})
    for patch in kustomization.get("patches", []):
        found = [item for item in objects if _is_target(item, patch["target"])]
        assert found, f"nothing is {patch['target']}"
        for item in found:
            _patch(item, yaml.safe_load(patch["patch"]))
    for item in objects:
        if item["kind"] not in CLUSTER_WIDE:
            item["metadata"]["namespace"] = kustomization["namespace"]
        for image in kustomization.get("images", []):
            _set_image(item, image)
        for labels in kustomization.get("labels", []):
            item["metadata"].setdefault("labels", {}).update(labels["pairs"])
    return objects


def _is_target(item: dict[str, Any], target: dict[str, str]) -> bool:
    return (item["kind"], item["metadata"]["name"]) == (target["kind"], target["name"])


def _patch(item: dict[str, Any], operations: list[dict[str, Any]]) -> None:
    """Apply the operations add and replace of a JSON patch (RFC 6902); what is replaced has to be there."""
    for operation in operations:
        assert operation["op"] in ("add", "replace")
        *parents, last = operation["path"].split("/")[1:]
        parents = [part.replace("~1", "/").replace("~0", "~") for part in parents]
        place: Any = item
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        key = int(last) if isinstance(place, list) else last
        if operation["op"] == "replace":
            assert place[key] is not None
        place[key] = copy.deepcopy(operation["value"])


def _set_image(part: Any, image: dict[str, str]) -> None:
    """Give every container, of objects of any kind, the image that stands for its own."""
    if isinstance(part, dict):
        if part.get("image", "").partition(":")[0] == image["name"]:
            part["image"] = f"{image['newName']}:{image['newTag']}"
        for value in part.values():
            _set_image(value, image)
    elif isinstance(part, list):
        for value in part:
            _set_image(value, image)
