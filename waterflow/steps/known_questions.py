"""What a job's steps have asked of their batches, so that each batch can be told apart by that."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from waterflow.capture.questions import Question
from waterflow.job.batch import FlatBatch

#: So many questions are put to one batch, and so many ways are told apart in which batches that are
#: alike answer them: more are no choice between ways through the code, and hardly one repeats.
_MOST_QUESTIONS, MOST_WAYS = 16, 24
#: From so many captures on, each has to serve so many steps on average.
_FEW_CAPTURES, _STEPS_OF_EACH = 6, 3


class KnownQuestions:
    """The questions known of a job's steps.

    By the signature of the batches that they are put to, which each answer makes longer: what is
    asked next may depend on the answers before. Whoever captures holds the cache's lock; anybody
    may ask.

    Attributes:
        are_many: whether batches answer in too many ways for a capture of each.
    """

    def __init__(self) -> None:
        self.are_many = False
        self._known: dict[Hashable, Question] = {}
        self._ways: dict[Hashable, set[Hashable]] = {}  # by the signature without answers

    def __bool__(self) -> bool:
        return bool(self._known)

    def answered(self, flat: FlatBatch) -> FlatBatch:
        """The batch with its answers to all that is known to be asked of such ones."""
        if not self._known:
            return flat
        signature = flat.signature
        while (question := self._known.get(flat.signature)) is not None:
            flat = flat.answering(question)
        if flat.signature is not signature:
            ways = self._ways.setdefault(signature, set())
            ways.add(flat.signature)
            self.are_many = self.are_many or len(ways) > MOST_WAYS
        return flat

    def weigh(self, runs: Iterable[int]) -> None:
        """Before one more capture; `runs`: how many steps were made of each of those before that
        answers belong to."""
        made = list(runs)
        few = sum(made) < _STEPS_OF_EACH * len(made)
        self.are_many = self.are_many or (len(made) >= _FEW_CAPTURES and few)

    def learn(self, flat: FlatBatch, questions: Iterable[Question]) -> FlatBatch:
        """A step on this batch, with all its answers, was found to ask this.

        Returns:
            The batch with its answers to that, too.
        """
        for question in questions:
            if question not in dict(flat.answers):
                self.are_many = self.are_many or len(flat.answers) >= _MOST_QUESTIONS
                self._known[flat.signature] = question
                flat = flat.answering(question)
        return flat
