"""Will it fit, and how fast is a step? Before a GPU is taken.

    python -m minirl.plan --config my.yaml --gpus 8 --gpu h200

Needs no GPU and no weights: a model's config.json is enough. Flags that are not the planner's own
are settings of the run, as its program takes them.
"""

import gc
import sys

from minirl.base.errors import BAD_INPUT, UserError
from minirl.plan.flags import read_flags


def main() -> int:
    """Print the plan. Return the exit code: 0: it fits; 2: it does not, or a mistake."""
    try:
        own, cfg = read_flags(sys.argv[1:])

        from minirl.plan.command import print_plan  # here, because this takes seconds

        return print_plan(own, cfg)
    except UserError as error:
        print(f"minirl: error: {error}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    gc.disable()  # Next to nothing of what is imported is garbage, and looking takes a second.
    sys.exit(main())
