#!/usr/bin/env bash
# Runs the tests in .venv, which it makes if it is missing. Arguments go to pytest:
#   bash launch/test.sh tests/test_algo.py -k ppo
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
exec .venv/bin/python -m pytest "$@"
