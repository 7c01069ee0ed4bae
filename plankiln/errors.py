"""What a user's mistake looks like: one line `what: where`, then `hint: what to do`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault. `where` is a file:line, a tensor, a key path… or empty."""

    what: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.what}: {self.where}" if self.where else self.what
        return f"{line}\nhint: {self.hint}" if self.hint else line


class PlankilnError(Exception):
    """Base of every error a user can cause. Carries one or more problems; the command line prints them and exits."""

    exit_code = 1

    def __init__(self, what: str | Sequence[Problem], where: str = "", hint: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, where, hint),) if isinstance(what, str) else tuple(what)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[PlankilnError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class UsageError(PlankilnError):
    """The command line itself is wrong."""

    exit_code = 2


class RecipeError(PlankilnError):
    """A recipe does not say something buildable."""


class CheckpointError(PlankilnError):
    """A model's files are missing, damaged or not understood."""


class ExportError(PlankilnError):
    """A model cannot be expressed as our graph."""


class BuildError(PlankilnError):
    """A stage of a build failed."""


class ToolchainError(BuildError):
    """No usable compiler, or it refused the generated code."""


class BundleError(PlankilnError):
    """A bundle is damaged, untrusted, or not for this machine."""


class RequestError(PlankilnError):
    """A generation request that can never be served."""


class EngineError(PlankilnError):
    """The engine failed while executing a step."""
