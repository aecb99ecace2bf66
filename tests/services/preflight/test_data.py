"""Tests the text about the first prompts before a run starts."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.preflight.check import check_run, describe_run
from tests.services.preflight.test_check import model_in, with_model


def test_describe_run_shows_the_first_prompt_in_its_script_and_no_control_character(tmp_path: Path) -> None:
    settings = with_model(tmp_path / "run", model_in(tmp_path / "model", vocab_size=258))
    letters = ["<pad>", "<eos>", *pre_tokenizers.ByteLevel.alphabet()]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    row = {"prompt": "こんにちは\n1\x1b[2J\x7f\x9b\u202e\u2066\u2028é=", "answer": "1"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    findings = check_run(settings)
    assert findings.model is not None
    assert findings.source is not None
    (line, *_) = (
        one for one in describe_run(settings, findings.model, findings.source) if one[:5] == "first"
    )
    assert line == r'first    "こんにちは\n1\u001b[2J\x7f\x9b\u202e\u2066\u2028é="'
