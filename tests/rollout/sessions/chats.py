"""Chat templates, each with a real tokenizer: those that installed packages have, and our own with the habits
of well-known ones."""

import ast
import functools
import importlib.util
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.render import RenderConfig, Renderer

SPECIAL = [
    "<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|header_start|>", "<|header_end|>", "<|eot|>",
    "<|call|>", "<|start|>", "<|end|>", "<|message|>",
]  # fmt: skip
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
OUR_OWN = {
    "tool use": (TOOL_USE, "<|im_end|>"),
    "forgets thoughts": (FORGETS_THOUGHTS, "<|im_end|>"),
    "tools at the last user": (TOOLS_AT_LAST_USER, "<eos>"),
    "call before result": (CALL_BEFORE_RESULT, "<|end|>"),
    "trims": (TRIMS, "<|eot|>"),
    "none": ("", "<eos>"),
}
ENDS = {"<|im_end|>": "<|im_end|>", "<|eot|>": "<|eot|>"}
"""Text in a template -> the token that ends a turn."""


def templates() -> dict[str, tuple[str, str]]:
    """Return name -> template and the token that ends a turn."""
    found = dict(OUR_OWN)
    for path in sorted(_folder("vllm", "transformers_utils/chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(), _end(path.read_text())
    for path in sorted(_folder("transformers", "models").glob("*/processing_*.py")):
        source = path.read_text()
        if 'chat_template = "' not in source:
            continue
        for node in ast.parse(source).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="chat_template")], value=ast.Constant(value=str(text))):
                    found[path.stem] = text, _end(text)
    return found


@functools.cache
def renderer(name: str) -> Renderer:
    """Return a renderer with a template, and a byte-level tokenizer that has some merges."""
    template, end = templates()[name]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _tokenizer(end)
        tokenizer.chat_template = template or None
        tokenizer.save_pretrained(folder)
        return Renderer(Path(folder), RenderConfig())


def _tokenizer(end: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges make tokens of text differ from those that were sampled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ċ", "Ċ"), ("<", "/")]
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, bos_token="<bos>", pad_token="<pad>",
        extra_special_tokens=[word for word in SPECIAL[3:] if word != end],
    )  # fmt: skip


def _end(template: str) -> str:
    return next((token for text, token in ENDS.items() if text in template), "<eos>")


def _folder(package: str, inside: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / inside if spec is not None and spec.origin else Path("/nonexistent")
