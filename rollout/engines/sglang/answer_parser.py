"""`python -m rollout.engines.sglang.answer_parser`: parses answers as SGLang's server does."""

from typing import Any

from rollout.engines.answer_lines import Parse, check_names, serve_lines


def load(options: dict[str, Any]) -> Parse:
    """Return a function that applies the parsers `tools` and `reasoning`; without a model, only check names.

    Raises:
        ValueError: a parser name is unknown, or a parser rejects the tokenizer.
    """
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    known = {
        "tools": list(FunctionCallParser.ToolCallParserEnum),
        "reasoning": list(ReasoningParser.DetectorMap),
    }
    check_names("sglang", options, known)
    if not options["model_dir"]:
        return lambda fields: {}

    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer = get_tokenizer(options["model_dir"])

    def parse(fields: dict[str, Any]) -> dict[str, Any]:
        thoughts, content, calls = "", fields["marked"], []
        if options["reasoning"]:
            parser = _reasoning_parser(ReasoningParser, options["reasoning"], tokenizer, fields["opened"])
            thoughts, content = parser.parse_non_stream(content)
        if options["tools"] and fields["tools"]:
            tools = [Tool(**tool) for tool in fields["tools"]]
            finder = FunctionCallParser(tools, options["tools"], tokenizer=tokenizer)
            if finder.has_tool_call(content or ""):
                content, calls = finder.parse_non_stream(content)
        if not thoughts and not calls:
            content = fields["text"]
        found = [(call.name, call.parameters) for call in calls]
        return {"thoughts": thoughts, "content": content, "calls": found}

    return parse


def _reasoning_parser(make: Any, name: str, tokenizer: Any, opened: str) -> Any:
    """Return a parser for one answer, inside thoughts if the tokens before the answer opened them."""
    parser = make(name, stream_reasoning=False, tokenizer=tokenizer)
    start = getattr(parser.detector, "think_start_token", "")
    if start and opened.rstrip().endswith(start):
        parser = make(name, stream_reasoning=False, tokenizer=tokenizer, force_reasoning=True)
    return parser


if __name__ == "__main__":
    serve_lines(load)
