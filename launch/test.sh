#!/usr/bin/env bash
# Runs the tests in .venv, which it makes if it is missing. Arguments go to pytest:
#   bash launch/test.sh tests/test_algo.py -k ppo
MINIRL_DEV=1
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
# The tests of a file stay in one process, and share what its fixtures have computed.
exec .venv/bin/python -m pytest -n auto --dist loadfile "$@"
