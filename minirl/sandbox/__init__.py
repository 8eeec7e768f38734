"""Untrusted programs, run where they can do no harm."""

from minirl.sandbox.runner import READABLE, Limits, ProgramResult, check_supported, passes, run

__all__ = ["READABLE", "Limits", "ProgramResult", "check_supported", "passes", "run"]
