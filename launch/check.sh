#!/usr/bin/env bash
# Checks the form of the code: format, lint and types. The tests are launch/test.sh.
#   bash launch/check.sh          # says what is wrong, changes nothing
#   bash launch/check.sh --fix    # formats, and mends what ruff can mend by itself
MINIRL_DEV=1
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
if [ "${1:-}" = --fix ]; then
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .
else
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
fi
exec .venv/bin/mypy
