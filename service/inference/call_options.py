"""Options of a call of a model, which go with its inputs from the caller to the queue."""

import time
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from typing import Literal, TypedDict, get_args

from service.inference.errors import DeadlineExceeded, InvalidInput

OnOverflow = Literal["truncate", "truncate_left", "truncate_right", "error"]
Priority = Literal["interactive", "bulk"]

_OVERFLOWS, _PRIORITIES = get_args(OnOverflow), get_args(Priority)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline that has started to run.

    Attributes:
        seconds: Duration from its start, in seconds.
        end: Time of its end, by `time.monotonic`.
    """

    seconds: float
    end: float

    @classmethod
    def start(cls, seconds: float) -> "Deadline":
        """Return a deadline that starts now."""
        return cls(seconds, time.monotonic() + seconds)

    @property
    def remaining_s(self) -> float:
        """Time until its end in seconds; 0 after it."""
        return max(0.0, self.end - time.monotonic())

    def check(self) -> None:
        """Raise `DeadlineExceeded` after its end."""
        if not self.remaining_s:
            raise self.error()

    def error(self) -> DeadlineExceeded:
        """Return the error of a call that has not ended in time."""
        return DeadlineExceeded(f"deadline of {self.seconds:g} s exceeded")


class QueueArguments(TypedDict, total=False):
    """Keyword arguments of the methods of `Model` that decide when a call runs.

    Attributes:
        timeout_s: Deadline of the call in seconds, or one that already runs; None: no deadline.
        priority: "interactive" calls run before "bulk" calls, which still have a tenth of the
            tokens that run.
    """

    timeout_s: float | Deadline | None
    priority: Priority


class CallArguments(QueueArguments, total=False):
    """Keyword arguments of the methods of `Model`, with those of `QueueArguments`.

    Attributes:
        prompt_name: Name of the prompt to prepend to each text, or to the first text of each pair;
            None: the model's default prompt. An adapter with the name of the prompt is applied too.
        on_overflow: Handling of inputs that exceed the model's maximum length. "truncate_left"
            drops the first tokens, and "truncate_right" the last. "truncate" drops tokens on the
            truncation side of the model, usually the right. "error" raises `InvalidInput`. In a
            pair that is too long, the longer text loses tokens first.
    """

    prompt_name: str | None
    on_overflow: OnOverflow


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of a call; see `CallArguments`.

    Attributes:
        instruction: Instruction of a reranker with a template of pairs; None: that of the prompt.
    """

    prompt_name: str | None = None
    on_overflow: OnOverflow = "truncate"
    deadline: Deadline | None = None
    priority: Priority = "interactive"
    instruction: str | None = None

    @property
    def remaining_s(self) -> float | None:
        """Time until the deadline, in seconds; None: no deadline."""
        return None if self.deadline is None else self.deadline.remaining_s


NO_OPTIONS = CallOptions()


def call_options(
    prompt_name: str | None = None,
    on_overflow: OnOverflow = "truncate",
    timeout_s: float | Deadline | None = None,
    priority: Priority = "interactive",
) -> CallOptions:
    """Return the options of a call, whose deadline starts to run.

    Raises:
        InvalidInput: An option is invalid; `pointer` names it.
    """
    if not isinstance(prompt_name, str | None):
        raise _invalid("prompt_name", "a text or None")
    if not isinstance(on_overflow, str) or on_overflow not in _OVERFLOWS:
        raise _invalid("on_overflow", f"one of {', '.join(_OVERFLOWS)}")
    if not isinstance(priority, str) or priority not in _PRIORITIES:
        raise _invalid("priority", f"one of {', '.join(_PRIORITIES)}")
    return CallOptions(prompt_name, on_overflow, _deadline(timeout_s), priority)


def with_instruction(options: CallOptions, instruction: str | None) -> CallOptions:
    """Return the options of a call with an instruction, which excludes a prompt.

    Raises:
        InvalidInput: The instruction is invalid, or there is a prompt too.
    """
    if not (instruction is None or (isinstance(instruction, str) and instruction)):
        raise _invalid("instruction", "a text that is not empty, or None")
    if instruction is not None and options.prompt_name is not None:
        raise InvalidInput(
            "instruction and prompt_name are mutually exclusive; set only one of them",
            pointer="/instruction",
        )
    return replace(options, instruction=instruction)


def _deadline(timeout_s: float | Deadline | None) -> Deadline | None:
    if timeout_s is None or isinstance(timeout_s, Deadline):
        return timeout_s
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not (is_number and 0 <= float(timeout_s) < inf):
        raise _invalid("timeout_s", "a finite number of seconds that is not negative or None")
    return Deadline.start(float(timeout_s))


def _invalid(name: str, allowed: str) -> InvalidInput:
    return InvalidInput(f"{name} must be {allowed}", pointer=f"/{name}")
