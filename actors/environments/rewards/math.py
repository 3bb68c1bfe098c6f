r"""Answers that are equal as mathematics, by math-verify.

    response ──► final answer: the last \boxed{..}, else the last <answer>..</answer>, else the last "#### ..", else what
                 "answer is" says, else the last formula or number of the last 600 characters
    gold ──────► its one answer, without delimiters ──► both in the same plain form ──► equal as text, or by math-verify

Only the final answer is parsed: a long chain of thought costs no more than its last lines. math-verify's own time-outs are off, because
they cannot interrupt sympy's arithmetic: the process that this runs in is killed instead.
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from actors.environments.base import Problem
from actors.environments.rewards.base import Response, Reward, corrupt

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each response that is no mathematics

_TAIL = 600  # characters at the end of a response that says in no way where its answer is
_LONGEST = 2000  # characters of an answer; a longer one is no answer
_PARSED = 500  # characters of a formula that is parsed
_CACHED = 4096

# math-verify takes c, h or ab after a number for units: of 2ab it leaves 2. `split_unit` does it here.
_LATEX = LatexExtractionConfig()
_LATEX = replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False))

_MARK = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GSM = re.compile(r"^\s*####\s*(.+?)\s*$", re.MULTILINE)
_SAYS = re.compile(r"answer(?:\s+is|\s*=|:)\s*:?[ \t]*(?=\S)", re.IGNORECASE)
_SENTENCE = re.compile(r"\.(?=\s|$)|\n|,?\s(?:because|since|as)\s|;")
_DELIMITED = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\quad|\\qquad|~")
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,])")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![A-Za-z\d])")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi|infty)(?![A-Za-z])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree\b|\s+degrees?$")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_SPACE = re.compile(r" (?!\d)|(?<!\d) ")
_MIXED = re.compile(r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?![\d/])")
_EMPHASIS = re.compile(r"(?<![\w)\]])\*\*|\*\*(?![\w(])")  # not Python's power, as in 2**3
_LEFT_SIDE = re.compile(r"^\s*((?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?)(\([a-z]\))?\s*=\s*(?=[^=]+$)")

_NUMBER = r"[-+]?\\?[$€£]?(?:[\d.,]*\d(?:/\d+)?|\\[dt]?frac\{\d+\}\{\d+\})"
_SHORT_UNIT = r"(?:[cmkdn]m|[mk]g|m[lL]|ft|lbs?|oz|hrs?|mi|mph|[kM]?Hz|m/s)"
# A letter after a number is a variable, unless it is in \text: 5 m is five times m, and 2ab no number of abs.
_BARE_UNIT = re.compile(
    rf"((?:.*=\s*)?{_NUMBER})\s*((?:{_SHORT_UNIT}(?![A-Za-z])|(?<=\s)[A-Za-zµ]{{3,}})(?:[ /]+[A-Za-zµ]+)*)((?:\^\{{?\d\}}?)?)\.?"
)
_TEXT_UNIT = re.compile(r"(.*[\w})!%])\s*\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{\s*([^{}]*?)\s*\}((?:\^\{?\d\}?)?)\.?", re.DOTALL)
_BASE = re.compile(r"(\d[\dA-F]*)(_\{?\d+\}?)()")
_NO_UNIT = re.compile(
    r"\b(?:or|and|not|to|more|less|than|most|least|if|mod|sin|cos|tan|cot|sec|csc|arc\w+|log|ln|exp|sqrt|pi|infty|theta|alpha|beta)\b"
)
_UNIT_NAMES = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "kilometer": "km", "meter": "m", "metre": "m", "feet": "ft", "foot": "ft",
    "kilogram": "kg", "gram": "g", "pound": "lb", "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s", "inches": "inch",
}  # fmt: skip
_WORDS = re.compile(r"[^\W\d_][\w'’-]*(?:[ ,/-]+[\w'’-]+)*[.!?]?")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)
_OPERATOR = re.compile(r"[-+*/^×÷·]|or|and")
_LISTED = re.compile(r"\(?[-+]?[$€£]?[\d.,/]*\d[,;]?")  # a number before the last one
_JOINED = re.compile(r"[\s$\\)]*?(,?\s*\b(?:or|and)\b|,|;)[\s$\\(]*")
_BETWEEN = 24  # characters between two answers that are joined
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
        return rf"\boxed{{{gold_text(problem.answer)}}}"

    def corrupted(self, problem: Problem) -> str | None:
        """None for a formula without a number: turned round, it may be equal to itself; and for a binomial, as 5 over 2 is 5 over 3."""
        answer = gold_text(problem.answer)
        if r"\binom" in answer or (not _Answer.of_gold(problem.answer).is_text and not any(character.isdigit() for character in answer)):
            return None
        return rf"\boxed{{{corrupt(answer)}}}"


class _Answer:
    """One answer in plain form, and what it is.

    Attributes:
        whole: see `plain_form`. left: x of x = 5. plain: the whole without this left side. unit: see `split_unit`.
        is_text: words or a time of day, which are compared as text alone.
    """

    def __init__(self, text: str) -> None:
        value, self.unit = split_unit(text)
        self.whole = plain_form(value)
        left = _LEFT_SIDE.match(self.whole)
        self.left = "" if left is None or left[2] else left[1]
        self.plain = self.whole if left is None else self.whole[left.end() :]
        bare = self.plain.strip("()")
        self.is_text = bool(_CLOCK.fullmatch(bare) or (_WORDS.fullmatch(bare) and not _is_formula(bare)))

    @staticmethod
    @lru_cache(maxsize=_CACHED)
    def of_gold(gold: str) -> _Answer:
        """Of the data; parsed once however many responses there are."""
        return _Answer(gold_text(gold))

    @property
    def compact(self) -> str:
        """Value and unit without spaces, but for those between digits: 5 m and 5\\text{m} are the same."""
        return _SPACE.sub("", self.plain + self.unit)

    @cached_property
    def parsed(self) -> list[Any]:
        """What math-verify reads; empty: nothing."""
        return _expressions(self.plain)

    @property
    def words(self) -> str:
        return " ".join(self.plain.strip("()").rstrip(".!?").casefold().split())


def gold_text(gold: str) -> str:
    """The answer of the data alone, which may be a whole solution, as in GSM8K's and MATH's own columns."""
    named = final_answer(gold)
    return undelimited(gold) if named is None else named


def final_answer(text: str) -> str | None:
    r"""What the response calls its answer, without delimiters; None: it says nowhere which it is.

    The last \boxed{..} counts (with those that "or", "and" or a comma join to it), else the last <answer>..</answer>, else the last
    "#### .." line, else the sentence after the last "answer is".
    """
    if (boxed := last_boxed(text)) is not None:
        return undelimited(boxed)
    opened = text.rfind("<answer>")
    if opened >= 0 and (closed := text.find("</answer>", opened)) >= 0:
        return undelimited(text[opened + len("<answer>") : closed])
    text = _EMPHASIS.sub("", text)
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
    r"""The content of the last \boxed{..} or \fbox{..} whose braces are balanced; None: there is none. Linear in the text.

    Joined ones are one answer: `\boxed{1} or \boxed{2}` is `1 or 2`.
    """
    answer, begin = None, len(text)
    for mark in reversed(list(_MARK.finditer(text))[-8:]):  # the very last may be cut off
        end = _closing(text, mark.end())
        if end is None:
            continue
        content = text[mark.end() : end]
        if answer is None:
            answer, begin = content, mark.start()
        elif end < begin:
            between = _JOINED.fullmatch(text[end + 1 : begin]) if begin - end < _BETWEEN else None
            if between is None:
                break
            answer, begin = f"{content} {between[1].strip()} {answer}", mark.start()
    return answer


def _closing(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` is closed."""
    depth = 1
    for brace in _BRACE.finditer(text, start, start + _LONGEST):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None


def undelimited(text: str) -> str:
    r"""Without \boxed{..}, "####", $..$, \(..\), \[..\] around it."""
    text = text.strip()
    while len(text) <= _LONGEST:
        inner = text
        if text.startswith("####"):
            inner = text.removeprefix("####")
        elif (mark := _MARK.match(text)) and _closing(text, mark.end()) == len(text) - 1:
            inner = text[mark.end() : -1]
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
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return " ".join(text.split())


def split_unit(text: str) -> tuple[str, str]:
    """A value, and the unit after it under one name: `5 cm`, `12\\pi\\text{ cm}^2`; the base of `1000_2` counts as one. None: ''."""
    text = _SPACING.sub(" ", text).strip()
    found = _TEXT_UNIT.fullmatch(text) or _BARE_UNIT.fullmatch(text) or _BASE.fullmatch(text)
    if not found or _NO_UNIT.search(found[2].casefold()):
        return text, ""
    words = [word.removesuffix("s") if len(word) > 3 else word for word in found[2].casefold().split()]
    unit = " ".join(_UNIT_NAMES.get(word, word) for word in words) + found[3]
    return found[1], unit.replace("{", "").replace("}", "")


def _equal(gold: _Answer, answer: str | None, said: str) -> bool:
    if answer is None:
        return _said_at_the_end(gold, said)
    given = _Answer(answer)
    if not given.plain:
        return False
    if gold.is_text or given.is_text:
        return gold.words == given.words
    if gold.compact == given.compact:
        return gold.left == given.left or not (gold.left and given.left)
    if gold.unit and given.unit and gold.unit != given.unit:
        return False
    if _HEDGE.search(given.plain) and not (_HEDGE.search(gold.plain) or "," in gold.plain):
        return False
    if gold.left and gold.left != given.left and "=" in given.whole:
        return _verified(_expressions(gold.whole), _expressions(given.whole))
    *sides, last = (side.strip() for side in given.whole.split("="))
    if any(re.fullmatch(_NUMBER, side) and not _verified(_expressions(side), _expressions(last)) for side in sides):
        return False  # of 4 = 5, math-verify takes the 5
    return _verified(gold.parsed, given.parsed)


def _verified(gold: list[Any], given: list[Any]) -> bool:
    """math-verify compares decimals to 6 places: of a small number that would be nothing, so 6 significant digits are asked for."""
    if not gold or not given:
        return False
    places = 6
    if getattr(gold[0], "is_Number", False) and gold[0].is_finite and 0 < abs(gold[0]) < 1:
        places += min(300, -math.floor(math.log10(abs(gold[0]))) - 1)
    return bool(verify(gold, given, float_rounding=places, timeout_seconds=None))


def _said_at_the_end(gold: _Answer, said: str) -> bool:
    """The response names no answer: it is all an answer, or its last formula or number is."""
    if len(said) <= _LONGEST:
        whole = _Answer(undelimited(_EMPHASIS.sub("", said)))
        if gold.is_text or (whole.plain == gold.plain and whole.unit == gold.unit and whole.left == gold.left):
            return gold.words == whole.words
    elif gold.is_text:
        return False
    answer = last_expression(_EMPHASIS.sub("", said[-_TAIL:]))
    return answer is not None and _equal(gold, answer, said)


def last_expression(tail: str) -> str | None:
    """The last formula, or a later number with the operators and numbers before it; those that are joined to it are one answer."""
    formulas = list(_DELIMITED.finditer(tail))
    rest = tail[formulas[-1].end() :] if formulas else tail
    if formulas and not any(character.isdigit() for character in rest):
        answer = undelimited(formulas[-1].group())
        for earlier, later in zip(formulas[-2::-1], formulas[:0:-1], strict=False):
            between = tail[earlier.end() : later.start()]
            joined = _JOINED.fullmatch(between) if len(between) < _BETWEEN else None
            if joined is None:
                break
            answer = f"{undelimited(earlier.group())} {joined[1].strip()} {answer}"
        return answer
    return _last_number(rest.split())


def _last_number(words: list[str]) -> str | None:
    last = next((place for place in reversed(range(len(words))) if any(character.isdigit() for character in words[place])), None)
    if last is None:
        return None
    first = last
    while first and (_OPERATOR.fullmatch(words[first - 1]) or _OPERATOR.fullmatch(words[first]) or _LISTED.fullmatch(words[first - 1])):
        first -= 1
    unit = words[last + 1] if last + 1 < len(words) else ""
    found = re.fullmatch(rf"({_SHORT_UNIT}|[mgsh])[.,;:!?]*", unit)
    answer = " ".join(words[first : last + 1]).strip("\"'`").rstrip(".,;:?")
    if answer.count(")") > answer.count("("):
        answer = answer.rstrip(")")
    answer = _MIXED.sub(r"\1\\frac{\2}{\3}", answer)
    if not _SPACED.fullmatch(answer):
        answer = re.sub(r"(?<=\d)\s+(?=\d)", ", ", answer)  # 1 2 3 is no product
    return rf"{answer}\text{{{found[1]}}}" if found else answer


def _expressions(text: str) -> list[Any]:
    """What math-verify makes of one formula. Text that it could not read is not an answer."""
    balanced = sum(map(text.count, "([{")) == sum(map(text.count, ")]}"))  # else the parser may take seconds to give up
    if not text or len(text) > _PARSED or not balanced:
        return []
    found: list[Any] = parse(f"${text}$", extraction_config=[_LATEX], fallback_mode="no_fallback", parsing_timeout=None)
    return found


def _is_formula(text: str) -> bool:
    """Whether letters are variables, as in x-y or B,C, rather than words."""
    return all(len(letters) == 1 for letters in re.findall(r"[^\W\d_]+", text))
