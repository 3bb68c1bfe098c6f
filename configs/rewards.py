"""What a response is paid for: a list of weighted rewards, and the processes that compute them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.base import StrictModel, VariableNames
from configs.import_path import IMPORT_PATH
from configs.redaction import Options, Url
from configs.secrets import SecretReference, gather

_NAME = r"[A-Za-z][A-Za-z0-9_]*"


class BaseReward(StrictModel):
    """What every reward has."""

    kind: str
    name: str = Field("", description="In metrics and reports; default: the kind.")
    weight: float = Field(1.0, ge=-1e6, le=1e6, allow_inf_nan=False, description="Of this reward in the sum; 0: only logged.")
    timeout_s: PositiveFloat = Field(10.0, description="Longest time for one response; then its process is killed and replaced.")

    @property
    def label(self) -> str:
        return self.name or self.kind

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if value and not re.fullmatch(_NAME, value):
            raise ValueError("a reward's name is a word of letters, digits and underscores")
        return value


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    return value


Regex = Annotated[str, AfterValidator(_compiles)]


class ExactReward(BaseReward):
    """1 when the response is the answer, but for space around it."""

    kind: Literal["exact"] = "exact"
    pattern: Regex | None = Field(
        None, description="Regular expression; its last match (its first group, if it has one) is compared, and no match is wrong."
    )
    ignore_case: bool = False
    ignore: str = Field("", description="Characters that are left out of both before comparing, for example ',$%'.")


class RegexReward(BaseReward):
    """1 when the pattern is found in the response; for formats."""

    kind: Literal["regex"] = "regex"
    pattern: Regex = Field(description="Regular expression; `(?s)` lets a dot match line ends.")
    full: bool = Field(False, description="The whole response must match.")


class JsonSchemaReward(BaseReward):
    """1 when the response is a JSON document (or holds one in a fence) that fits the schema."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any] = Field(description="JSON Schema, draft 2020-12 unless it says another.")


class MathReward(BaseReward):
    """1 when the response's answer equals the problem's as mathematics (math-verify)."""

    kind: Literal["math"] = "math"


class ReasoningGymReward(BaseReward):
    """What the generator's own verifier gives, in [0, 1]."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    answer_pattern: Regex | None = Field(None, description="Regular expression; its last match is scored, an empty answer if none.")


class LengthReward(BaseReward):
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 for short responses, falling to -1 over the last tokens."""

    kind: Literal["length"] = "length"
    max_tokens: PositiveInt | None = Field(None, description="Where the punishment reaches -1; default: rollout.max_new_tokens.")
    cache_tokens: PositiveInt | None = Field(
        None, description="Over how many tokens before max_tokens it falls from 0 to -1; default: a fifth of them (DAPO: 4,096 of 20,480)."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_tokens is not None and self.cache_tokens is not None and self.cache_tokens > self.max_tokens:
            raise ValueError(
                f"cache_tokens ({self.cache_tokens}) is above max_tokens ({self.max_tokens}): every response would be punished"
            )
        return self


class PythonReward(BaseReward):
    """A function `reward(completions, **columns) -> list[float | None]` of one's own, sync or async; or a class whose objects are such.

    It is called with one completion at a time: `completions`, `prompts` and every column of the row are lists of one.
    """

    kind: Literal["python"] = "python"
    import_path: str = Field(description="'package.module:function' or 'package.module:Class'.")
    options: Options = Field(default_factory=dict, description="Keyword arguments of the class; values may be ${env:NAME}.")

    @field_validator("import_path")
    @classmethod
    def _an_import_path(cls, value: str) -> str:
        if not IMPORT_PATH.fullmatch(value):
            raise ValueError("write 'package.module:function'")
        return value


class EnvironmentReward(BaseReward):
    """The environment's own `score`: of a `python` environment."""

    kind: Literal["environment"] = "environment"


class JudgeReward(BaseReward):
    """A grade by a model behind an OpenAI-compatible endpoint, divided by `scale`."""

    kind: Literal["judge"] = "judge"
    timeout_s: PositiveFloat = Field(60.0, description="Longest wait for one grade, retries and rate limits included.")
    url: Url = Field(description="Base URL of the endpoint: http://127.0.0.1:8000/v1.", pattern=r"^https?://")
    model: str
    api_key: SecretReference | None = Field(None, description="${env:NAME} or ${file:path}.")
    prompt: str = Field(
        "Question:\n{question}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "Does the response answer the question correctly? Reply with one number from 0 (wrong) to 10 (right), and nothing else.",
        description="What the judge is asked; {question}, {answer} and {response} are filled in.",
    )
    pattern: Regex = Field(
        r"(?<![\d./])(?<!/ )-?\d+(?:\.\d+)?",  # of "8/10" the 8
        description="Regular expression; its last match (its first group, if it has one) in the judge's reply is the grade.",
    )
    scale: PositiveFloat = Field(10.0, description="The grade is divided by this, and must then be within 0 and 1.")
    max_tokens: PositiveInt = 64
    temperature: float = Field(0.0, ge=0)
    requests_per_minute: PositiveInt | None = Field(None, description="Of all requests of the run; default: no limit.")
    tokens_per_minute: PositiveInt | None = Field(None, description="Of prompt and reply together, as far as known beforehand.")
    concurrency: PositiveInt = Field(16, description="Most requests at once.")
    retries: NonNegativeInt = Field(4, description="After refusals for the rate (429), server errors and lost connections.")
    cache_size: NonNegativeInt = Field(10_000, description="Grades that are kept, so that an equal question is not asked twice.")

    @field_validator("url", mode="before")
    @classmethod
    def _no_password(cls, value: Any) -> Any:
        if isinstance(value, str) and "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("a URL with a user or password would stand in every report: give the key as api_key, by reference")
        return value


AnyReward = Annotated[
    ExactReward
    | RegexReward
    | JsonSchemaReward
    | MathReward
    | ReasoningGymReward
    | LengthReward
    | PythonReward
    | EnvironmentReward
    | JudgeReward,
    Field(discriminator="kind"),
]


def gathered_of(rewards: Sequence[AnyReward]) -> dict[str, str]:
    """What the references in options and URLs refer to, but for judges' keys, looked up in this process. Raises: see `secrets.gather`."""
    found: dict[str, str] = {}
    for reward in rewards:
        if isinstance(reward, PythonReward):
            found |= gather(reward.options, f"rewards.{reward.label}.options")
        elif isinstance(reward, JudgeReward):
            found |= gather(reward.url, f"rewards.{reward.label}.url")
    return found


# The verifier that belongs to each kind of environment.
OWN_REWARDS: dict[str, AnyReward] = {"reasoning_gym": ReasoningGymReward(), "dataset": MathReward(), "python": EnvironmentReward()}
Consequence = Literal["zero", "drop_sample", "drop_group"]


class ScoringConfig(StrictModel):
    """The processes in which rewards are computed, and what becomes of a response that has none.

    They keep accidents and careless verifiers away from the run. Code that is out to do harm wants a container (docs/rewards.md).
    """

    processes: PositiveInt | None = Field(None, description="Default: the cores of the machine, at most 16.")
    memory_mib: PositiveInt = Field(4096, description="Address space of one process.")
    max_processes: PositiveInt = Field(64, description="Processes and threads that one scoring process may start.")
    batch_timeout_s: PositiveFloat = Field(600.0, description="Longest time for the rewards of responses that ended together.")
    environment_variables: VariableNames = Field(
        (), description="Names of variables that the processes get besides PATH, HOME and the like."
    )
    success: str | None = Field(
        None, description="Name of the reward whose raw value says whether a response is right; default: the first that has an opinion."
    )
    success_threshold: float = Field(1.0, description="A response is right when that value is at least this.")
    on_timed_out: Consequence = Field("zero", description="zero: the reward is 0; drop_sample: not trained on; drop_group: nor its group.")
    on_failed: Consequence = Field("zero", description="As on_timed_out, for a reward that raised, or returned no finite number.")
    tolerance: float = Field(
        0.5, ge=0, le=1, description="A larger part of the last `tolerance_window` responses without reward ends the run."
    )
    tolerance_window: PositiveInt = Field(256, description="Responses; fewer than these never end the run.")
