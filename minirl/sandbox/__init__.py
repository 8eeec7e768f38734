"""Untrusted programs, run where they can do no harm."""
