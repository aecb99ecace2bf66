"""A naive synchronous loop of GRPO, in transformers and torch alone, and the reward of the compared run.

Each version generates a batch, all of which trains the next one. A sample's random numbers are drawn from its
group and place, as a run's are with `run.deterministic`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUPS, SAMPLES, LENGTH, LR = 4, 4, 3, 2e-3


def seed_of(*places: int, seed: int = 0) -> int:
    """Return a call's seed, by its group, sample and number, as docs/reproducible.md says."""
    for place in places:
        seed = xxhash.xxh3_64_intdigest(f"{seed} {place}".encode()) >> 1
    return seed


def score(response: str) -> float:
    """The reward: one for each 7, less a tenth for each character."""
    return response.count("7") - 0.1 * len(response)


@dataclass
class Loop:
    """The loop; `steps` yields the tokens of each step, after which `model` has the next version."""

    model_dir: Path
    prompts: Path
    device: str = "cpu"
    model: torch.nn.Module = field(init=False)

    def __post_init__(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        self.model = model.to(self.device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(self.model_dir)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        for module in self.model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # its row is trained like the others

    def steps(self, number: int) -> Iterator[list[list[int]]]:
        """Make steps; yields the sampled tokens of each, group by group."""
        texts = [json.loads(line)["prompt"] for line in self.prompts.read_text().splitlines()]
        for step in range(number):
            samples, advantages = [], []
            for group in range(step * GROUPS, (step + 1) * GROUPS):
                prompt = self._tokenizer(texts[group])["input_ids"]
                answers = [self._sample(prompt, seed_of(group, sample, 0)) for sample in range(SAMPLES)]
                samples += [(prompt, answer) for answer in answers]
                rewards = torch.tensor([score(self._text(answer)) for answer in answers]).double()
                centred = rewards - rewards.mean()
                advantages.append((centred / (centred.square().mean().sqrt() + 1e-4)).float())
            self._train(samples, torch.cat(advantages))
            yield [answer for _, answer in samples]

    def _text(self, answer: list[int]) -> str:
        text: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return text

    @torch.no_grad()
    def _sample(self, prompt: list[int], seed: int) -> list[int]:
        generator, answer = torch.Generator(self.device).manual_seed(seed), list[int]()
        while len(answer) < LENGTH and answer[-1:] != [self._tokenizer.eos_token_id]:
            logits = self.model(torch.tensor([[*prompt, *answer]], device=self.device)).logits[0, -1]
            answer.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        return answer

    def _train(self, samples: list[tuple[list[int], list[int]]], advantages: torch.Tensor) -> None:
        """Make one update on all samples; every ratio of policies is one, so clips have no effect."""
        advantages = advantages.to(self.device)
        rows = [prompt + answer for prompt, answer in samples]
        padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        padded = padded.to(self.device)
        places = [
            (row, place)
            for row, (prompt, answer) in enumerate(samples)
            for place in range(len(prompt), len(prompt) + len(answer))
        ]
        row, place = torch.tensor(places, device=self.device).T
        kept = (place - 1).unique()
        logits = self.model(input_ids=padded, use_cache=False, logits_to_keep=kept).logits
        chosen = logits[row, torch.searchsorted(kept, place - 1)]
        logprobs = chosen.gather(-1, padded[row, place][:, None])[:, 0] - chosen.logsumexp(-1)
        lengths = torch.tensor([len(answer) for _, answer in samples], device=self.device)
        weights = 1.0 / (lengths * len(samples))
        ratio = (logprobs - logprobs.detach()).exp()
        (-(ratio * advantages[row]) * weights[row]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
