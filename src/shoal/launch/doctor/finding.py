"""What a check found, and all findings of an examination as text and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "failure"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "failure")


@dataclass(frozen=True)
class Finding:
    """One line of the examination. What is not ok has a remedy."""

    status: Status
    found: str
    remedy: str = ""
    check: str = ""  # the name in the table of checks

    def text(self) -> str:
        line = f"{self.status:9}{self.check:17}{self.found}"
        return f"{line}\n{'':9}→ {self.remedy}" if self.remedy else line

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> "Finding":
        return Finding(**found)


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warning(found: str, remedy: str) -> Finding:
    return Finding("warning", found, remedy)


def failure(found: str, remedy: str) -> Finding:
    return Finding("failure", found, remedy)


def worst(findings: list[Finding]) -> Finding:
    """The first of those with the worst status."""
    return max(findings, key=lambda one: STATUSES.index(one.status))


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not self._count("failure")

    def text(self) -> str:
        return "\n".join(one.text() for one in self.findings)

    def summary(self) -> str:
        failures, warnings = self._count("failure"), self._count("warning")
        if not failures and not warnings:
            return f"{len(self.findings)} checks, all ok."
        parts = [
            f"{number} {noun}{'s' * (number > 1)}"
            for number, noun in ((failures, "failure"), (warnings, "warning"))
            if number
        ]
        return f"{len(self.findings)} checks: {', '.join(parts)}."

    def as_dict(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "failures": self._count("failure"),
            "warnings": self._count("warning"),
            "findings": [asdict(one) for one in self.findings],
        }

    def _count(self, status: Status) -> int:
        return sum(one.status == status for one in self.findings)
