"""`python -m rollout.engines.vllm.answer_parser`: parses answers as vLLM's server does."""

from typing import Any

from rollout.engines.answer_lines import Parse, check_names, serve_lines


def load(options: dict[str, Any]) -> Parse:
    """Return a function that applies the parsers `tools` and `reasoning`; without a model, only check names.

    Raises:
        ValueError: a parser name is unknown.
        TypeError: a parser rejects the tokenizer.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    known = {
        "tools": ToolParserManager.list_registered(),
        "reasoning": ReasoningParserManager.list_registered(),
    }
    check_names("vllm", options, known)
    if not options["model_dir"]:
        return lambda fields: {}

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(options["model_dir"])
    parser_of: Any = ParserManager.get_parser(
        tool_parser_name=options["tools"] or None,
        reasoning_parser_name=options["reasoning"] or None,
        enable_auto_tools=bool(options["tools"]),
        model_name=options["model_dir"],
        tokenizer=tokenizer,
    )

    def parse(fields: dict[str, Any]) -> dict[str, Any]:
        tools = fields["tools"] if options["tools"] else []
        request = ChatCompletionRequest(
            model="policy", messages=[{"role": "user", "content": ""}], tools=tools or None
        )
        parser = parser_of(tokenizer, request.tools)
        text = fields["text"] if parser.adjust_request(request).skip_special_tokens else fields["marked"]
        parser.set_prompt_token_ids(fields["before"])
        thoughts, content, calls = parser.parse(
            text, request, enable_auto_tools=bool(tools), model_output_token_ids=fields["tokens"]
        )
        parsed_calls = [(call.name, call.arguments) for call in calls or ()]
        return {"thoughts": thoughts, "content": content, "calls": parsed_calls}

    return parse


if __name__ == "__main__":
    serve_lines(load)
