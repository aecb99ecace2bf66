"""Chat templates, each with a real tokenizer: those that installed packages have, and our own with the habits
of well-known ones."""

import ast
import functools
import importlib.util
import re
import tempfile
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.render import RenderConfig, Renderer

SPECIAL = re.compile(
    r"<[|｜][^<>{}\s'\"]{1,40}[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|</s>|\[/?[A-Z_]{3,30}\]"
)
"""What templates write that is one token."""
ENDS_OF_CALLS = ("<|call|>", "<|eom_id|>", "<|eom|>", "<|observation|>", "<|tool_response>")
"""Tokens that end an answer besides the one that ends a turn."""
TOOLS_FIRST = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' }}"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
TOOL_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

TOOL_USE = (
    TOOLS_FIRST + "{% for m in messages %}{% if m.role == 'tool' %}" + TOOL_RESULTS
    + "{% elif m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}" + GENERATE
)  # fmt: skip
FORGETS_THOUGHTS = (
    TOOLS_FIRST + "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + TOOL_RESULTS
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if '</think>' in m.content and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}" + CALLS + "<|im_end|>\n"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)  # fmt: skip
TOOLS_AT_LAST_USER = (
    "<bos>{% set ns = namespace(n=0, last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}[CALL]{{ call.function | tojson }}{% endfor %}<eos>"
    "{% endif %}{% endfor %}"
)
CALL_BEFORE_RESULT = (
    "{% set ns = namespace(tool='') %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not ns.tool %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ ns.tool }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' and m.tool_calls %}{% set ns.tool = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ ns.tool }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TRIMS = (
    "<bos>{% for m in messages %}"
    "<|header_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
ARGUMENTS_AS_TEXT = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + ' ' + call.function.arguments }}<|call|>"
    "{% else %}{{ m.content }}<|end|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
CLOSED_TWICE = (
    "{% for m in messages %}<|turn|>{{ m.role }}<|text|>{{ m.content }}<|end_text|><|end_turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant<|text|>{% endif %}"
)
RESULTS_OF_CALLS_ALONE = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[CALL]{{ call.function | tojson }}[/CALL]"
    "{% endfor %}"
    "{% if m.tool_calls %}{% for r in messages[loop.index0 + 1:] %}{% if r.role == 'tool' %}"
    "[RESULT]{{ r.content }}[/RESULT]{% endif %}{% endfor %}"
    "{% else %}<|end|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|start|>assistant<|message|>{% endif %}"
)
OUR_OWN = {
    "arguments as text": ARGUMENTS_AS_TEXT,
    "closed twice": CLOSED_TWICE,
    "results of calls alone": RESULTS_OF_CALLS_ALONE,
    "tool use": TOOL_USE,
    "forgets thoughts": FORGETS_THOUGHTS,
    "tools at the last user": TOOLS_AT_LAST_USER,
    "call before result": CALL_BEFORE_RESULT,
    "trims": TRIMS,
    "none": "",
}

ENDS = {"closed twice": "<|end_turn|>"}
"""Template -> the token that ends a turn, where it is not the first one behind an answer."""


@functools.cache
def templates() -> dict[str, str]:
    """Return name -> template."""
    found = dict(OUR_OWN)
    for package, inside in (("vllm", "transformers_utils/chat_templates"), ("trl", "chat_templates")):
        for path in sorted(_folder(package, inside).glob("*.jinja")):
            if path.stem.endswith("_training"):
                continue  # the same with marks of what is trained
            found[path.stem] = path.read_text()
    for path in sorted(_folder("transformers", "models").glob("*/processing_*.py")):
        source = path.read_text()
        if 'chat_template = "' not in source:
            continue
        for node in ast.parse(source).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="chat_template")], value=ast.Constant(value=str(text))):
                    found[path.stem] = text
    return found


@functools.cache
def renderer(name: str) -> Renderer:
    """Return a renderer with a template, and a byte-level tokenizer that has some merges."""
    return renderer_of(templates()[name], ENDS.get(name, ""))


def renderer_of(template: str, end: str = "") -> Renderer:
    """Return a renderer whose tokenizer has the special tokens of a template.

    Args:
        template: empty for none.
        end: the token that ends a turn; empty: the one that the template writes behind an answer.
    """
    end = end or _end(template)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _tokenizer(template, end)
        tokenizer.save_pretrained(folder)
        stops = tuple(token for token in ENDS_OF_CALLS if token in template and token != end)
        return Renderer(Path(folder), RenderConfig(stop=stops))


def _end(template: str) -> str:
    """Return the special token that a template writes behind an answer."""
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "tether"}
    try:
        text = _tokenizer(template, "<eos>").apply_chat_template([question, answer, question], tokenize=False)
    except (TemplateError, TypeError, ValueError):  # of transformers, of jinja, or of the template
        return "<eos>"
    found = SPECIAL.match(text.rpartition("tether")[2].lstrip())
    return found.group() if found else "<eos>"


def _tokenizer(template: str, end: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges make tokens of text differ from those that were sampled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ċ", "Ċ"), ("<", "/")]
    special = dict.fromkeys(("<pad>", "<bos>", "<eos>", end, *SPECIAL.findall(template)))
    words = [*alphabet, *("".join(pair) for pair in merges), *special]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, bos_token="<bos>", pad_token="<pad>",
        extra_special_tokens=[word for word in special if word not in (end, "<bos>", "<pad>")],
    )  # fmt: skip
    fast.chat_template = template or None
    return fast


def _folder(package: str, inside: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / inside if spec is not None and spec.origin else Path("/nonexistent")
