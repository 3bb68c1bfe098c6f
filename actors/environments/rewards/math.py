r"""Answers that are equal as mathematics, by math-verify.

    response ──► final answer: the last \boxed{..}, else the last "#### ..", else what "answer is" says, else the end of the text
    gold ──────► its one answer, without delimiters ──► both in the same plain form ──► equal as text, or by math-verify

Only the final answer is parsed: a long chain of thought costs no more than its last lines. math-verify's own time-outs are off, because
they cannot interrupt sympy's arithmetic: the process that this runs in is killed instead.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from actors.environments.base import Problem
from actors.environments.rewards.base import Response, Reward, corrupt

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each response that is no mathematics

_TAIL = 600  # characters at the end of a response that says in no way where its answer is
_LONGEST = 2000  # characters of an answer; a longer one is no answer
_PARSED = 500  # characters of a formula that is parsed
_CACHED = 4096

_MARK = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GSM = re.compile(r"^\s*####\s*(.+?)\s*$", re.MULTILINE)
_SAYS = re.compile(r"answer(?:\s+is|\s*=|:)\s*:?[ \t]*(?=\S)", re.IGNORECASE)
_SENTENCE = re.compile(r"\.(?=\s|$)|\n|,?\s(?:because|since|as)\s|;")
_DELIMITED = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\quad|\\qquad|~")
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,])")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![A-Za-z\d])")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi|infty)(?![A-Za-z])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree\b|\s+degrees?$")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"^([-+]?[\d.]+(?:/[\d.]+)?|[-+]?\\d?frac\{\d+\}\{\d+\})\s*([A-Za-zµ€£][A-Za-zµ /]*(?:\^\{?\d\}?)?)$")
_LEFT_SIDE = re.compile(r"^\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?\s*=\s*(?=[^=]+$)")
_WORDS = re.compile(r"[^\W\d_][\w'’-]*(?:[ ,/-]+[\w'’-]+)*[.!?]?")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)
_HEDGE = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\text\s*\{\s*or\s*\}|\\lor", re.IGNORECASE)


class MathReward(Reward):
    """1 when the response's final answer equals the problem's, else 0. What counts as equal: docs/rewards.md."""

    def score(self, problem: Problem, response: Response) -> float:
        said = response.text.strip()
        if not said:
            return 0.0
        return float(said == problem.answer.strip() or _equal(_Answer.of_gold(problem.answer), final_answer(said), said))

    def check(self, problem: Problem) -> None:
        gold = _Answer.of_gold(problem.answer)
        if not gold.plain:
            raise ValueError("the answer is empty")
        if not gold.is_text and not gold.parsed:
            raise ValueError(f"the answer {problem.answer[:60]!r} is neither mathematics that math-verify can read, nor words")

    def reference(self, problem: Problem) -> str:
        return rf"\boxed{{{undelimited(problem.answer)}}}"

    def corrupted(self, problem: Problem) -> str | None:
        """None for a formula without a number: turned round, it may be equal to itself."""
        answer = undelimited(problem.answer)
        if not _Answer.of_gold(problem.answer).is_text and not any(character.isdigit() for character in answer):
            return None
        return rf"\boxed{{{corrupt(answer)}}}"


class _Answer:
    """One answer in plain form, and what it is.

    Attributes:
        plain: see `plain_form`. unit: after a number, in lower case, without a plural's s.
        is_text: words or a time of day, which are compared as text alone.
    """

    def __init__(self, text: str) -> None:
        self.plain = plain_form(text)
        self.unit = ""
        if found := _UNIT.match(self.plain):
            self.plain, self.unit = found[1], found[2].strip().casefold().removesuffix("s")
        bare = self.plain.strip("()")
        self.is_text = bool(_CLOCK.fullmatch(bare) or (_WORDS.fullmatch(bare) and not _is_formula(bare)))
        self._parsed: list[Any] | None = None

    @staticmethod
    @lru_cache(maxsize=_CACHED)
    def of_gold(gold: str) -> _Answer:
        """Of the data; parsed once however many responses there are."""
        return _Answer(undelimited(gold))

    @property
    def parsed(self) -> list[Any]:
        """What math-verify reads; empty: nothing."""
        if self._parsed is None:
            too_long = not self.plain or len(self.plain) > _PARSED
            self._parsed = [] if too_long else _expressions(f"${self.plain}$")
        return self._parsed

    @property
    def words(self) -> str:
        return " ".join(self.plain.strip("()").rstrip(".!?").casefold().split())


def final_answer(text: str) -> str | None:
    r"""What the response calls its answer, without delimiters; None: it says nowhere which it is.

    The last \boxed{..} counts, else the last "#### .." line, else the sentence after the last "answer is".
    """
    if (boxed := last_boxed(text)) is not None:
        return undelimited(boxed)
    lines = _GSM.findall(text)
    if lines:
        return undelimited(lines[-1])
    said = deque(_SAYS.finditer(text), maxlen=1)
    if not said:
        return None
    rest = text[said[0].end() : said[0].end() + _LONGEST]
    if found := _DELIMITED.match(rest):
        return undelimited(found.group())
    return undelimited(_SENTENCE.split(rest, maxsplit=1)[0])


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{..} or \fbox{..} whose braces are balanced; None: there is none. Linear in the text."""
    marks = list(_MARK.finditer(text))
    for mark in reversed(marks[-8:]):  # the very last may be cut off
        depth = 1
        for brace in _BRACE.finditer(text, mark.end(), mark.end() + _LONGEST):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                return text[mark.end() : brace.start()]
    return None


def undelimited(text: str) -> str:
    r"""Without \boxed{..}, "####", $..$, \(..\), \[..\] around it."""
    text = text.strip()
    while len(text) <= _LONGEST:
        inner = text
        if text.startswith("####"):
            inner = text.removeprefix("####")
        elif (mark := _MARK.match(text)) and (boxed := last_boxed(text)) is not None and mark.end() + len(boxed) + 1 == len(text):
            inner = boxed
        elif found := _DELIMITED.fullmatch(text.removesuffix(".")):
            inner = next(group for group in found.groups() if group is not None)
        if inner == text:
            break
        text = inner.strip()
    return text


def plain_form(text: str) -> str:
    """The same for answers that differ in writing only: spacing, thousands separators, currency, per cent, degrees, text commands."""
    text = text.strip().rstrip(".").replace("−", "-").replace("\\left", "").replace("\\right", "").replace("\\dfrac", "\\frac")
    text = text.replace("\\tfrac", "\\frac").replace("^\\circ", "°").replace("{,}", ",")
    text = _SPACING.sub(" ", text)
    text = _TEXT.sub(lambda found: f" {found[1].strip()} ", text)
    text = re.sub(r"\\?[$€£](?=\s*[-\d.])", "", text)
    text = re.sub(r"(?<=\d)\s*\\?%", "", text)
    text = _DEGREES.sub("", text)
    text = _GROUPED.sub(lambda found: found[1] + found[2].replace(",", ""), text)
    text = _SPACED.sub(lambda found: found.group().replace(" ", ""), text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _FUNCTION.sub(r"\\\1 ", text)
    return " ".join(_LEFT_SIDE.sub("", text).split())


def _equal(gold: _Answer, answer: str | None, said: str) -> bool:
    if answer is None:
        return _said_at_the_end(gold, said)
    given = _Answer(answer)
    if not given.plain:
        return False
    if gold.is_text or given.is_text:
        return gold.words == given.words
    if gold.unit and given.unit and gold.unit != given.unit:
        return False
    if gold.plain == given.plain:
        return True
    hedges = _HEDGE.search(given.plain) and not _HEDGE.search(gold.plain)
    return not hedges and bool(gold.parsed) and bool(given.parsed) and verify(gold.parsed, given.parsed, timeout_seconds=None)


def _said_at_the_end(gold: _Answer, said: str) -> bool:
    """The response names no answer: it is all an answer, or its last formula or number is."""
    if len(said) <= _LONGEST:
        whole = _Answer(undelimited(said))
        if gold.is_text or whole.plain == gold.plain:
            return gold.words == whole.words
    elif gold.is_text:
        return False
    tail = said[-_TAIL:]
    formulas = list(_DELIMITED.finditer(tail))
    if formulas:
        return _equal(gold, undelimited(formulas[-1].group()), said)
    given = parse(plain_form(tail), extraction_config=[ExprExtractionConfig()], parsing_timeout=None)
    return bool(gold.parsed) and bool(given) and verify(gold.parsed, given, timeout_seconds=None)


def _expressions(text: str) -> list[Any]:
    """What math-verify makes of one formula. Text that it could not read is not an answer."""
    found: list[Any] = parse(text, extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return found


def _is_formula(text: str) -> bool:
    """Whether a string of letters is a product of variables, as in xy, rather than a word."""
    return len(text) == 1
