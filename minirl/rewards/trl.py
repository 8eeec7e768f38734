"""TRL's reward functions, as they are.

    --reward.function trl:my_rewards.py:f
    # def f(completions, **columns) -> list[float | None], or async

`f` gets, as keywords, `prompts`, `completions` and every column of the row (minirl adds `answer`
and `data_source`), each as a list of one: it is called for one completion at a time, from several
threads. Where the prompt is a list of messages the completion is one too, else it is a text. None,
"this does not apply", is 0 in the sum of rewards and in the metrics. `completion_ids`,
`trainer_state`, `log_extra` and `log_metric` belong to TRL's trainer; a function that needs one of
them ends the run with an error.
"""

import asyncio
import inspect

from minirl.config.lookup import find_function
from minirl.rewards import RewardFunction, RowPrompt

NOT_COLUMNS = ("prompt", "completion", "completion_ids", "rendered_prompt")


def reward(place: str) -> RewardFunction:
    """Return the reward function at `place`, file.py:function.

    Raises:
        UserError: There is no such function.
    """
    function = find_function("reward.function", place, {})

    def score(prompt: RowPrompt, completion: str, row: dict) -> float:
        columns = {name: [value] for name, value in row.items() if name not in NOT_COLUMNS}
        message = [{"role": "assistant", "content": completion}]
        given = completion if isinstance(prompt, str) else message
        values = function(prompts=[prompt], completions=[given], **columns)
        [value] = asyncio.run(values) if inspect.iscoroutine(values) else values
        return 0.0 if value is None else value

    return score
