"""Mixtures: shares, order, ends, what a prompt says of its source, and what is refused."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig
from rollout.prompts.mixture import BLOCK, MixtureSource, quotas
from rollout.prompts.named_source import MixtureConfig
from rollout.prompts.registry import make_source


def file(directory: Path, name: str, count: int) -> MixtureConfig:
    path = directory / f"{name}.jsonl"
    rows = ({"prompt": f"{name}{i}", "answer": str(i), "source": "a column"} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MixtureConfig(name=name, path=str(path))


@pytest.fixture
def entries(tmp_path: Path) -> tuple[MixtureConfig, MixtureConfig]:
    return replace(file(tmp_path, "a", 40), weight=3), file(tmp_path, "b", 10)


def stream(config: PromptConfig, indices: range) -> list[str]:
    source = make_source(config)
    return [source.at(i).text for i in indices]


def test_each_source_has_its_share_of_every_block(entries: tuple[MixtureConfig, ...]) -> None:
    source = make_source(PromptConfig(mixture=entries))
    assert source.size is None
    for block in range(3):
        owners = Counter(source.at(block * BLOCK + i).metadata["source"] for i in range(BLOCK))
        assert owners == {"a": 750, "b": 250}


def test_a_prompt_says_where_it_comes_from_and_where_it_is(entries: tuple[MixtureConfig, ...]) -> None:
    source = make_source(PromptConfig(mixture=entries))
    for index in (0, 17, 4711):
        prompt = source.at(index)
        name = prompt.metadata["source"]
        assert prompt.text == f"{name}{prompt.metadata['answer']}"
        assert prompt.index == index


def test_the_prompts_of_a_source_come_in_its_own_order(entries: tuple[MixtureConfig, ...]) -> None:
    mixed = stream(PromptConfig(mixture=entries, seed=5), range(2 * BLOCK))
    for entry, length in zip(entries, (1500, 500), strict=True):
        alone = stream(PromptConfig(path=entry.path or "", seed=5), range(length))
        assert [text for text in mixed if text.startswith(entry.name)] == alone


@dataclass(frozen=True)
class Numbered:
    """A source without end whose prompts are numbers."""

    fingerprint: str
    size: int | None = None

    def at(self, index: int) -> Prompt:
        return Prompt(str(index), index=index)

    def held_out(self) -> Sequence[Prompt]:
        return ()

    def trained_texts(self) -> Sequence[str]:
        return ()


@given(
    seed=st.integers(0, 2**30), indices=st.lists(st.integers(0, 10**6), max_size=20), stop=st.integers(0, 20)
)
def test_a_resumed_stream_is_the_same(seed: int, indices: list[int], stop: int) -> None:
    def made() -> MixtureSource:
        return MixtureSource("abc", quotas([1, 2, 4]), [Numbered(name) for name in "abc"], seed)

    whole, before, after = made(), made(), made()
    parts = [before.at(i) for i in indices[:stop]] + [after.at(i) for i in reversed(indices[stop:])][::-1]
    assert parts == [whole.at(i) for i in indices]


def test_another_seed_is_another_order(entries: tuple[MixtureConfig, ...]) -> None:
    config = PromptConfig(mixture=entries)
    assert stream(config, range(100)) != stream(replace(config, seed=1), range(100))


def test_the_stream_ends_with_the_first_source_that_runs_out(entries: tuple[MixtureConfig, ...]) -> None:
    short = replace(entries[1], passes=2)
    source = make_source(PromptConfig(mixture=(entries[0], short)))
    assert source.size is not None
    texts = [source.at(i).text for i in range(source.size)]
    used = Counter(text for text in texts if text.startswith("b"))
    assert used == {f"b{i}": 2 for i in range(10)}
    with pytest.raises(IndexError, match=f"prompt {source.size}"):
        source.at(source.size)
    both = make_source(PromptConfig(mixture=entries, passes=100))
    assert both.size is not None
    assert abs(both.size - 4000) < 10


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_quotas_are_the_shares_to_one_place(weights: list[float]) -> None:
    found = quotas(weights)
    assert sum(found) == BLOCK
    for weight, places in zip(weights, found, strict=True):
        assert abs(places - weight / sum(weights) * BLOCK) < 1 + 1e-6


def test_the_fingerprint_covers_sources_weights_names_and_seed(entries: tuple[MixtureConfig, ...]) -> None:
    a, b = entries
    base = PromptConfig(mixture=entries)
    others = [
        replace(base, seed=1),
        replace(base, passes=1),
        replace(base, held_out=1),
        replace(base, mixture=(b, a)),
        replace(base, mixture=(a, replace(b, weight=2))),
        replace(base, mixture=(a, replace(b, name="c"))),
        replace(base, mixture=(a, replace(b, count=9))),
        replace(base, mixture=(a, replace(b, path=a.path))),
    ]
    assert len({make_source(config).fingerprint for config in (base, *others)}) == 1 + len(others)
    assert make_source(replace(base, mixture=(replace(a, weight=6), replace(b, weight=2)))).fingerprint == (
        make_source(base).fingerprint
    )


def test_held_out_prompts_are_those_of_all_sources(tmp_path: Path) -> None:
    a, b = file(tmp_path, "a", 6), file(tmp_path, "b", 5)
    overlap = Path(b.path or "")
    overlap.write_text(overlap.read_text() + json.dumps({"prompt": "a1", "answer": "1"}) + "\n")
    held = make_source(PromptConfig(mixture=(a, b), held_out=2)).held_out()
    assert [(prompt.text, prompt.metadata["source"]) for prompt in held] == [
        ("a4", "a"),
        ("a5", "a"),
        ("b4", "b"),  # a1 is the last row of b, and a trains on it
    ]


def test_sources_of_different_kinds_mix(tmp_path: Path) -> None:
    rows = file(tmp_path, "a", 5)
    sums = MixtureConfig(name="sums", source="reasoning_gym", families=("chain_sum",))
    source = make_source(PromptConfig(mixture=(rows, sums)))
    assert {source.at(i).metadata["source"] for i in range(20)} == {"a", "sums"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": ""}, r"prompts\.mixture\.1\.name: ''"),
        ({"name": "a"}, r"prompts\.mixture\.1\.name: 'a' is taken"),
        ({"weight": 1e-4}, r"source b of prompts\.mixture: weight 0\.0001 is less than"),
        ({"path": "/nowhere"}, r"source b of prompts\.mixture: setting prompts\.path: '/nowhere'"),
        ({"held_out": 10}, r"source b of prompts\.mixture: .*leave 0 to train on"),
        ({"subset": "main"}, r"source b of prompts\.mixture: setting prompts\.subset: .*does not use it"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(
    entries: tuple[MixtureConfig, ...], change: dict[str, object], why: str
) -> None:
    a, b = entries
    with pytest.raises(SettingsError, match=why):
        make_source(PromptConfig(mixture=(a, replace(b, **change))))  # type: ignore[arg-type]


def test_held_out_files_belong_into_eval_sets(entries: tuple[MixtureConfig, ...]) -> None:
    with pytest.raises(SettingsError, match=r"\[\[eval\.sets\]\]"):
        make_source(PromptConfig(mixture=entries, held_out_path="x.jsonl"))
