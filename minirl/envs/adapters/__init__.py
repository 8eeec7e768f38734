"""Environments that were written for other libraries."""
