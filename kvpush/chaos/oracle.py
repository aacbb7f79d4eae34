# SPDX-License-Identifier: Apache-2.0
"""What is asked, what the right answers are, and whether an answer is one.

The right answers are those of a single vLLM instance without any connector, greedy, in float32. An answer is compared with
them in two ways, token by token:

* the **token**: prompts whose answer hangs on a difference in probability too small to survive another order of summation
  (which batches and chunks change) are left out beforehand, so that a different token always means different KV;
* the **log-probability** of the token, to a tolerance far above what the order of summation does and far below what one wrong
  block does. It sees wrong KV that happens not to change a token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["MARGIN", "TOLERANCE", "Answer", "Difference", "Oracle", "Prompt", "Reference", "make_prompts"]

#: Difference of log-probabilities between best and second-best token that every position of a reference has.
MARGIN: Final = 0.002
#: How far a token's log-probability may be from the reference's. See docs/chaos.md for how far they are.
TOLERANCE: Final = 0.001

_FIRST_BYTE: Final = 0x20
_LAST_BYTE: Final = 0x7E


@dataclass(frozen=True, slots=True)
class Prompt:
    """Something to ask.

    Args:
        prompt_id: names it in reports; tells its family and length.
        tokens: ids.
    """

    prompt_id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as far as it came.

    Args:
        tokens: ids.
        logprobs: of each of them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """The right answer to a prompt.

    Args:
        answer: of the longest length that is ever asked for.
        margin: smallest difference between the log-probabilities of best and second-best token.
    """

    answer: Answer
    margin: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Why an answer is wrong.

    Args:
        what: for people.
        position: of the first token that is wrong.
        expected: tokens, as many as there should be.
        got: tokens.
        deviation: of the log-probability at that position; NaN where a token is missing.
    """

    what: str
    position: int
    expected: tuple[int, ...]
    got: tuple[int, ...]
    deviation: float


@dataclass(slots=True)
class Oracle:
    """Judges answers.

    Args:
        references: by prompt id.
        tolerance: of log-probabilities.
    """

    references: Mapping[str, Reference]
    tolerance: float = TOLERANCE
    judged: int = 0
    """Answers, partial ones too."""
    judged_tokens: int = 0
    max_deviation: float = 0.0
    """Largest deviation of a log-probability among right answers."""

    def judge(self, prompt_id: str, answer: Answer, *, asked: int, whole: bool) -> Difference | None:
        """Compare an answer with the reference.

        Args:
            prompt_id: of the prompt.
            answer: as far as it came.
            asked: number of tokens asked for.
            whole: the answer has ended, so that none may be missing.

        Returns:
            What is wrong with it; None if nothing is.
        """
        right = self.references[prompt_id].answer
        expected, got = right.tokens[:asked], answer.tokens
        self.judged += 1
        self.judged_tokens += len(got)
        nan = float("nan")
        if len(answer.logprobs) != len(got):
            return Difference(f"{len(got)} tokens with {len(answer.logprobs)} log-probabilities", 0, expected, got, nan)
        largest = 0.0
        for at, token in enumerate(got):
            if at >= len(expected):
                return Difference(f"more than the {asked} tokens asked for", at, expected, got, nan)
            deviation = abs(answer.logprobs[at] - right.logprobs[at])
            if token != expected[at]:
                return Difference(f"token {at} is {token} instead of {expected[at]}", at, expected, got, deviation)
            if not deviation <= self.tolerance:
                what = f"the log-probability of token {at} is {answer.logprobs[at]:.5f} instead of {right.logprobs[at]:.5f}"
                return Difference(what, at, expected, got, deviation)
            largest = max(largest, deviation)
        if whole and len(got) < asked:
            return Difference(f"{len(got)} tokens instead of {asked}", len(got), expected, got, nan)
        self.max_deviation = max(self.max_deviation, largest)
        return None


def make_prompts(count: int, *, seed: int, longest: int, families: int = 5) -> list[Prompt]:
    """Make prompts of very different lengths, most of which share a beginning with others.

    Args:
        count: how many.
        seed: the same one gives the same prompts.
        longest: most tokens of a prompt, at least 64.
        families: number of shared beginnings.

    Returns:
        The prompts, all different.
    """
    rng = random.Random(f"chaos/prompts/{seed}")

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.randint(_FIRST_BYTE, _LAST_BYTE) for _ in range(length))

    beginnings = [text(rng.randint(longest // 16, longest // 2)) for _ in range(families)]
    prompts: list[Prompt] = []
    known: set[tuple[int, ...]] = set()
    while len(prompts) < count:
        family = rng.randint(0, families)
        # Short ones are as interesting as long ones: uniform in the logarithm.
        length = round(4 * (longest / 4) ** rng.random())
        start = beginnings[family][: rng.choice([length // 2, length])] if family < families else ()
        tokens = (start + text(max(1, length - len(start))))[:longest]
        if tokens not in known:
            known.add(tokens)
            prompts.append(Prompt(f"{len(prompts)}-{'abcdefghij'[family] if start else 'own'}-{len(tokens)}", tokens))
    return prompts
