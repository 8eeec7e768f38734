"""Untrusted programs, run where they can do no harm."""

from minirl.sandbox.runner import Limits, ProgramResult, check_supported, passes, run

__all__ = ["Limits", "ProgramResult", "check_supported", "passes", "run"]
