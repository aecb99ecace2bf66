"""An engine's side of a transfer as a process: `python -m tests.trainer.weights.receiver DEVICE`.

A command per line on standard input, an answer per line of JSON on standard output:

stage HEX   fetch the version into the copy        {"staged": version}, or {"error": text}
hang HEX    fetch half of it                       {"came": tensors}; then nothing more, until it is killed
wait HEX    fetch half of it                       {"came": tensors}; at the next line the rest, as `stage`
commit HEX  copy what is staged over the live      {"served": version}
digest      digest of the live tensors             {"digest": number}, after a matrix product
memory                                             {"free": bytes of the GPU}
"""

import json
import sys
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.slices import all_of
from rollout.staging.staging import Staging, digest_of, whole_source
from rollout.weights.registry import make_receiver

COUNT, SIZE = 16, 300_000
DEADLINE_S = 60.0


def slices_of(manifest: WeightManifest) -> Iterable[object]:
    """The slices of a version, one after the other."""
    found = make_receiver(manifest.transport).slices(manifest, all_of(manifest), DEADLINE_S)
    return (part for parts in found for part in parts)


def main() -> None:
    device = torch.device(sys.argv[1])
    live = {f"t{i}": torch.zeros(SIZE, device=device) for i in range(COUNT)}
    copy = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    staging = Staging({name: whole_source(tensor) for name, tensor in copy.items()})

    def stage(manifest: WeightManifest) -> dict[str, object]:
        try:
            staging.fetch(manifest, DEADLINE_S)
        except WeightError as error:
            return {"error": str(error)}
        return {"staged": manifest.version}

    def half(manifest: WeightManifest, then: Callable[[], object]) -> dict[str, object]:
        try:
            for came, _ in enumerate(slices_of(manifest), 1):
                if came == COUNT // 2:
                    print(json.dumps({"came": came}), flush=True)
                    then()
        except WeightError as error:
            return {"error": str(error)}
        return {"staged": manifest.version}

    def hang(manifest: WeightManifest) -> dict[str, object]:
        return half(manifest, lambda: time.sleep(DEADLINE_S))

    def wait(manifest: WeightManifest) -> dict[str, object]:
        return half(manifest, sys.stdin.readline)

    def commit(manifest: WeightManifest) -> dict[str, object]:
        served = staging.take(manifest)
        torch._foreach_copy_(list(live.values()), list(copy.values()))
        return {"served": served.version}

    commands: dict[str, Callable[[WeightManifest], dict[str, object]]] = {
        "stage": stage,
        "hang": hang,
        "wait": wait,
        "commit": commit,
    }
    for line in sys.stdin:
        command, _, text = line.strip().partition(" ")
        if command == "digest":
            assert torch.ones(8, 8, device=device).matmul(torch.ones(8, 8, device=device)).sum() == 512
            answer: dict[str, object] = {"digest": digest_of(live)}
        elif command == "memory":
            torch.cuda.empty_cache()
            answer = {"free": torch.cuda.mem_get_info()[0]}
        else:
            answer = commands[command](msgspec.msgpack.decode(bytes.fromhex(text), type=WeightManifest))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
