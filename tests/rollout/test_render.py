"""Rendering with real tokenizers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt
from rollout.render import ChatTemplate, PromptTooLong, RenderConfig, Renderer
from tests.rollout.tokenizers import CHARACTERS, TEMPLATE, write_tokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat"), template=TEMPLATE, eos="<|im_end|>")


MESSAGES = [{"role": "user", "content": "1+1"}]


def shown(renderer: Renderer, prompt: Prompt) -> str:
    return str(renderer._tokenizer.decode(renderer.prompt_tokens(prompt)))


def test_without_a_template_the_prompt_is_its_text(plain: Path) -> None:
    renderer = Renderer(plain, RenderConfig(suffix=" ="))
    assert renderer.text(renderer.prompt_tokens(Prompt("3 7"))) == "3 7 ="
    assert len(renderer.prompt_tokens(Prompt("372"))) == 5
    assert renderer.stop_token_ids == (1,)


def test_with_a_template_system_and_suffix_are_in_their_places(chat: Path) -> None:
    renderer = Renderer(chat, RenderConfig(system="brief", suffix=" now"))
    begin = "<|im_start|>system\nbrief<|im_end|><|im_start|>user\n"
    assert shown(renderer, Prompt("add")) == f"{begin}add now<|im_end|><|im_start|>assistant\n"
    conversation = Prompt("c", (("system", "own"), ("user", "a"), ("assistant", "b"), ("user", "c")))
    assert shown(renderer, conversation).startswith(
        "<|im_start|>system\nown<|im_end|><|im_start|>user\na<|im_end|>"
    )
    assert shown(renderer, conversation).endswith("<|im_start|>user\nc now<|im_end|><|im_start|>assistant\n")


def test_a_template_can_be_switched_off_and_its_absence_is_an_error(plain: Path, chat: Path) -> None:
    off = Renderer(chat, RenderConfig(chat_template=ChatTemplate.OFF, system="s"))
    assert shown(off, Prompt("add")) == "s\nadd"
    with pytest.raises(SettingsError, match=r"render\.chat_template: .* has no chat template"):
        Renderer(plain, RenderConfig(chat_template=ChatTemplate.ON))


def test_a_further_turn_closes_the_assistants_and_opens_the_next(plain: Path, chat: Path) -> None:
    renderer = Renderer(chat, RenderConfig())
    end = renderer.stop_token_ids[0]
    turn = renderer.turn_tokens("lower")
    assert (
        renderer._tokenizer.decode(turn)
        == "<|im_end|><|im_start|>user\nlower<|im_end|><|im_start|>assistant\n"
    )
    assert (end, *renderer.turn_tokens("lower", after=(9, end))) == turn
    assert renderer.turn_tokens("lower", after=(end, 9)) == turn
    assert renderer.turn_tokens("\x02assistant\x03lower")[:4] == turn[:4]  # it is cut before the text
    assert Renderer(plain, RenderConfig()).turn_tokens(" x ") == tuple(renderer._tokenizer.encode(" x "))


def test_stop_tokens_come_from_the_tokenizer_the_generation_config_and_the_settings(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path, template=TEMPLATE)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 1]}))
    assert Renderer(model, RenderConfig()).stop_token_ids == (1, 4)
    newline = len(CHARACTERS) + 5
    assert Renderer(model, RenderConfig(stop=("\n",), stop_at_eos=False)).stop_token_ids == (newline,)
    longer = Renderer(model, RenderConfig(stop=("\n", "ab"), stop_at_eos=False))
    assert longer.stop_token_ids == (newline,)
    with pytest.raises(SettingsError, match=r"render\.stop: an empty string would end every sample"):
        Renderer(model, RenderConfig(stop=("",)))
    (model / "generation_config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"generation_config\.json"):
        Renderer(model, RenderConfig())


def test_a_prompt_too_long_is_named(plain: Path) -> None:
    renderer = Renderer(plain, RenderConfig(max_prompt_tokens=3))
    assert len(renderer.prompt_tokens(Prompt("123"))) == 3
    with pytest.raises(PromptTooLong, match=r"prompt 41 has 4 tokens, over render\.max_prompt_tokens 3"):
        renderer.prompt_tokens(Prompt("1234", index=41))
    with pytest.raises(SettingsError, match="prompt 42 has no tokens"):
        renderer.prompt_tokens(Prompt("", index=42))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokens(plain: Path) -> None:
    """Its longest token is <|im_start|>, of 12 characters."""
    renderer = Renderer(plain, RenderConfig())
    assert renderer.longest_piece == 12
    assert len(renderer.encode("<|im_start|>" * 3, max_tokens=3)) == 3
    assert len(renderer.encode("1" * 36, max_tokens=3)) == 36
    for length in (37, 10**8):
        with pytest.raises(PromptTooLong, match=f"^at least {-(-length // 12)} tokens$"):
            renderer.encode("1" * length, max_tokens=3)
    with pytest.raises(
        PromptTooLong, match=r"prompt 41 has at least 4 tokens, over render\.max_prompt_tokens 3"
    ):
        Renderer(plain, RenderConfig(max_prompt_tokens=3)).prompt_tokens(Prompt("1" * 37, index=41))


@pytest.mark.parametrize(
    ("model", "splits", "lost"),
    [
        (models.BPE({"<eos>": 0, "1": 1, "2": 2}, []), pre_tokenizers.Split("", "isolated"), "+=é中"),
        (
            models.WordLevel({"<eos>": 0, "<unk>": 3, "1": 1, "2": 2}, unk_token="<unk>"),
            pre_tokenizers.Split("", "isolated"),
            "+=é中",
        ),
        (
            models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            "",
        ),
    ],
)
def test_characters_that_a_tokenizer_leaves_out_are_found(
    tmp_path: Path, model: Any, splits: Any, lost: str
) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splits
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    renderer = Renderer(tmp_path, RenderConfig(chat_template=ChatTemplate.OFF))
    assert renderer.characters_without_tokens(["1 + 2 = é中", "12 \n"]) == lost


def test_a_tokenizer_that_refuses_unknown_characters_leaves_none_out(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"<eos>": 0, "1": 1})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert Renderer(tmp_path, RenderConfig()).characters_without_tokens(["1"]) == ""


def test_a_template_that_refuses_a_prompt_names_it(tmp_path: Path) -> None:
    renderer = Renderer(
        write_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}"), RenderConfig()
    )
    with pytest.raises(SettingsError, match=r"prompt 5: .*roles must alternate"):
        renderer.prompt_tokens(Prompt("x", index=5))


def test_a_missing_or_broken_tokenizer_is_an_error_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no tokenizer in"):
        Renderer(tmp_path, RenderConfig())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match="cannot be loaded"):
        Renderer(tmp_path, RenderConfig())


@given(st.text(alphabet=CHARACTERS, min_size=1, max_size=60))
def test_text_round_trips_through_tokens(plain: Path, text: str) -> None:
    renderer = _cached(plain)
    assert renderer.text(renderer.prompt_tokens(Prompt(text))) == text


_renderers: dict[Path, Renderer] = {}


def _cached(path: Path) -> Renderer:
    return _renderers.setdefault(path, _renderers.get(path) or Renderer(path, RenderConfig()))


def test_a_template_of_parts_gets_the_text_as_a_part(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: "
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<eos>"
        "{% endfor %}"
    )
    renderer = Renderer(write_tokenizer(tmp_path, template=template, more=":<>"), RenderConfig())
    assert shown(renderer, Prompt("1+1?")) == "user: 1+1?<eos>"
    assert renderer.dialogue_text([{"role": "assistant", "content": "2"}]) == "assistant: 2<eos>"


THINKING = TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "no{{ words | join(' ') }}{% endif %}"
)


def test_a_template_of_a_file_with_variables_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    file, model = tmp_path / "own.jinja", write_tokenizer(tmp_path / "model")
    file.write_text(THINKING)
    variables = {"enable_thinking": False, "words": ["a", "b"]}
    config = RenderConfig(chat_template_file=str(file), chat_template_kwargs=variables)
    renderer = Renderer(model, config)
    oracle = PreTrainedTokenizerFast.from_pretrained(model)

    def expected(*messages: tuple[str, str]) -> tuple[int, ...]:
        said = [{"role": role, "content": content} for role, content in messages]
        ids = oracle.apply_chat_template(
            said, chat_template=THINKING, add_generation_prompt=True, return_dict=False, **variables
        )
        return tuple(ids)

    first = expected(("user", "1+1"))
    assert renderer.prompt_tokens(Prompt("1+1")) == first
    assert renderer.dialogue_text([{"role": "user", "content": "1+1"}]).endswith("assistant\nnoa b")
    end = renderer.encode("<|im_end|>")
    further = renderer.turn_tokens("2+2", after=(9, *end))
    behind = expected(("user", "1+1"), ("assistant", "2"), ("user", "2+2"))
    assert behind[-len(further) :] == further
    assert Renderer(model, RenderConfig()).prompt_tokens(Prompt("1+1")) != first


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"chat_template_kwargs": {"enable_thinkin": False}},
            "the chat template does not read enable_thinkin",
        ),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "add_generation_prompt is given by tether",
        ),
        (
            {"chat_template": ChatTemplate.OFF, "chat_template_kwargs": {"a": 1}},
            r"set render\.chat_template to auto",
        ),
        (
            {"chat_template": ChatTemplate.OFF, "chat_template_file": __file__},
            r"render\.chat_template_file: .*auto",
        ),
        (
            {"chat_template_file": "/nowhere/own.jinja"},
            r"render\.chat_template_file: /nowhere/own\.jinja: No",
        ),
    ],
)
def test_a_template_setting_without_effect_is_refused(chat: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Renderer(chat, RenderConfig(**given))


def test_a_tokenizer_of_its_own_directory_replaces_the_models(
    chat: Path, plain: Path, tmp_path: Path
) -> None:
    renderer = Renderer(plain, RenderConfig(tokenizer=str(chat)))
    assert renderer.has_template
    assert renderer.model_dir == chat
    with pytest.raises(SettingsError, match="no tokenizer in"):
        Renderer(plain, RenderConfig(tokenizer=str(tmp_path)))


@given(
    st.text(alphabet="ab?<", max_size=12),
    st.lists(st.text(alphabet="ab?", min_size=1, max_size=3), min_size=1),
)
def test_stopped_length_is_that_of_the_shortest_text_with_a_stop(
    chat: Path, text: str, stop: list[str]
) -> None:
    renderer = Renderer(chat, RenderConfig(stop=tuple(stop)))
    tokens = (*renderer.encode(text), renderer.stop_token_ids[0])
    kept = "".join(char for char in text if char in CHARACTERS)
    ends = [n for n in range(len(text) + 1) if any(item in text[:n] for item in stop)]
    if kept == text:
        assert renderer.stopped_length(tokens) == (ends[0] if ends else None)


@pytest.mark.parametrize("writes", [False, True])
def test_tools_that_a_template_leaves_out_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writes: bool
) -> None:
    file, model = tmp_path / "own.jinja", write_tokenizer(tmp_path / "model")
    tools = [{"type": "function", "function": {"name": "add"}}]
    file.write_text(
        "{{ tools | tojson if tools }}" * writes + "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    renderer = Renderer(model, RenderConfig(chat_template_file=str(file)))
    assert renderer.dialogue_text(MESSAGES) == "1+1"
    assert renderer.writes_tools == writes
    texts = {renderer.dialogue_text(MESSAGES, tools) for _ in range(2)}
    assert all(('"add"' in text) == writes for text in texts)
    assert sum("the chat template does not write tools" in text for text in caplog.messages) == (not writes)


def test_tools_without_a_template_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    renderer = Renderer(write_tokenizer(tmp_path / "model"), RenderConfig(chat_template=ChatTemplate.OFF))
    assert renderer.dialogue_text(MESSAGES, [{"type": "function"}]) == "1+1"
    assert "render.no_tools" in caplog.text


def test_a_template_that_cannot_be_parsed_is_refused_with_the_line(tmp_path: Path) -> None:
    file, model = tmp_path / "own.jinja", write_tokenizer(tmp_path / "model")
    file.write_text("{% for m in messages %}\n{{ m.content\n{% endfor %}")
    renderer = Renderer(model, RenderConfig(chat_template_file=str(file)))
    with pytest.raises(SettingsError, match=r"^prompt 0: the chat template refuses it: line 3: expected "):
        renderer.prompt_tokens(Prompt("1+1", index=0))
