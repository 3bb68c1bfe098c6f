"""An environment as a user would write it: repeat the word."""

from actors.environments import Environment, Problem, Split


class Parrot(Environment):
    def __init__(self, words: list[str]) -> None:
        self._words = words

    def size(self, split: Split) -> int:
        return len(self._words)

    def problem(self, split: Split, index: int) -> Problem:
        return Problem(uid=str(index), question=f"Say {self._words[index]}", answer=self._words[index])

    def score(self, problem: Problem, response: str) -> float:
        return float(response == problem.answer)
