"""Guided decoding: answers that a grammar of vLLM's holds to a JSON schema or to calls of tools.

A grammar masks tokens, so what is drawn is from the policy's distribution p cut to the allowed
tokens: p(token) / mass, where mass is the sum of p over them. The trainer knows p only. Where the
mask took nothing (mass = 1) the two are one, and the token is on-policy. Elsewhere the token
comes from the grammar as much as from the policy, and stays outside the loss, as what an
environment says.
The mass follows from what stands before a token and not from the token itself, so leaving tokens
out by it biases no gradient. The log-prob of a token in the loss is that of p, without the mask.

vLLM reports log-probs after the mask only. So the sum of the exponents of logits is taken before
and after it masks them.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minirl.base.errors import UserError, require

# A token is in the loss if the allowed tokens had at least this share of the probability. What is
# missing to 1 bounds the error of its ratio of probabilities.
LEAST_MASS = 0.999
_MAX_NESTING = 50  # Levels of a schema, which is compiled by recursion.
# A schema is compiled while everything waits. The time grows with the square of the properties of
# an object: 200 that may be missing and hold anything take half a second.
_MAX_CHARACTERS = 20_000
_MAX_PROPERTIES = 200
# Between two parts of a JSON text. JSON allows any number, and a model that does not know the
# format fills its answer with it. This is a line break and an indentation of three levels.
_MAX_WHITESPACE = 7


@dataclass(frozen=True)
class Guide:
    """What an answer is held to."""

    text: str  # A structural tag of xgrammar, as JSON.


def json_guide(schema: dict) -> Guide:
    """Return the guide to a JSON schema.

    Raises:
        UserError: the schema is too large, or vLLM cannot hold an answer to it.
    """
    from vllm.sampling_params import StructuredOutputsParams

    require(
        not is_deeper(schema, _MAX_NESTING),
        f"a JSON schema is nested in more than {_MAX_NESTING} levels; send a flatter one",
    )
    # In a bare schema vLLM also checks what xgrammar would ignore.
    _check(StructuredOutputsParams(json=json.dumps(schema)))
    json_format = {"type": "json_schema", "json_schema": schema}
    return tag_guide({"type": "structural_tag", "format": json_format})


def tag_guide(tag: dict) -> Guide:
    """Return the guide to a structural tag of xgrammar, with little white space in its JSON.

    Raises:
        UserError: the tag is too large, or vLLM cannot hold an answer to it.
    """
    most = _most_properties(tag)
    require(
        most <= _MAX_PROPERTIES,
        f"an object of a JSON schema has {most} properties, more than {_MAX_PROPERTIES}; send a "
        "smaller schema",
    )
    guide = Guide(json.dumps(_with_little_whitespace(tag)))
    _check(to_vllm(guide))
    return guide


def _with_little_whitespace(tag: Any) -> Any:
    """Return a structural tag that bounds the white space of all JSON in it."""
    if isinstance(tag, list):
        return [_with_little_whitespace(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        return tag | {"max_whitespace_cnt": _MAX_WHITESPACE}
    return {name: _with_little_whitespace(part) for name, part in tag.items()}


def _most_properties(schema: Any) -> int:
    """Return the number of properties of the object that has the most."""
    if isinstance(schema, list):
        return max(map(_most_properties, schema), default=0)
    if not isinstance(schema, dict):
        return 0
    properties = schema.get("properties")
    num_properties = len(properties) if isinstance(properties, dict) else 0
    return max(num_properties, *map(_most_properties, schema.values()), 0)


def is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested in more than so many levels."""
    if not isinstance(value, list | dict):
        return False
    if not levels:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(is_deeper(part, levels - 1) for part in parts)


def _check(outputs: Any) -> None:
    """Refuse structured outputs that vLLM would not take. Raises UserError."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    require(
        len(outputs.json or outputs.structural_tag) <= _MAX_CHARACTERS,
        f"a JSON schema has more than {_MAX_CHARACTERS} characters; send a smaller one",
    )
    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=outputs))
    except (RuntimeError, TypeError, ValueError, VLLMValidationError) as error:
        problem = str(error).splitlines()[0]
        raise UserError(
            f"vLLM cannot hold an answer to this JSON schema: {problem}; simplify it, or leave "
            "response_format and tool_choice out"
        ) from error


def to_vllm(guide: Guide) -> Any:
    """Return the guide as vLLM's sampling parameters have it."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(structural_tag=guide.text)


class MassRecorder:
    """Keeps the logarithm of the allowed mass of each token that was drawn under a mask."""

    def __init__(self) -> None:
        self._temperatures: dict[str, float] = {}  # By name of a request with a guide.
        self._log_masses: dict[str, list[float]] = {}

    def begin(self, request_id: str, temperature: float) -> None:
        """Begin to record a request, which draws tokens at this temperature."""
        self._temperatures[request_id] = temperature or 1.0  # 0 is greedy: any will do.
        self._log_masses[request_id] = []

    def end(self, request_ids: list[str]) -> None:
        """Forget requests, of which some may have no guide."""
        for request_id in request_ids:
            self._temperatures.pop(request_id, None)
            self._log_masses.pop(request_id, None)

    def take(self, request_id: str, num_tokens: int) -> list[float] | None:
        """Return the log masses of a request's next tokens.

        None: the request has no guide. A token without a record has minus infinity.
        """
        if request_id not in self._log_masses:
            return None
        kept = self._log_masses[request_id]
        taken = kept[:num_tokens]
        self._log_masses[request_id] = kept[num_tokens:]
        return taken + [-math.inf] * (num_tokens - len(taken))

    def around(self, logits: Tensor, row_of: dict[str, int], mask: Callable[[], None]) -> None:
        """Call `mask`, which masks logits in place, and keep what it took.

        Args:
            logits: float [rows, vocabulary].
            row_of: rows of requests by vLLM's names, which are minirl's with an ending.
            mask: masks the rows.
        """
        names = {name.split("-")[0]: row for name, row in row_of.items()}
        names = {name: row for name, row in names.items() if name in self._temperatures}
        rows = list(names.values())
        scales = logits.new_tensor([self._temperatures[name] for name in names])[:, None]
        before = (logits[rows] / scales).logsumexp(1) if rows else None
        mask()
        if before is None:
            return
        log_masses = (logits[rows] / scales).logsumexp(1) - before
        for name, log_mass in zip(names, log_masses.tolist(), strict=True):
            self._log_masses[name].append(log_mass)


def patch_masks(recorder: MassRecorder) -> None:
    """Have the recorder see every mask that vLLM applies, in both of its model runners."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    apply_v1 = gpu_model_runner.apply_grammar_bitmask
    apply_v2 = StructuredOutputsWorker.apply_grammar_bitmask

    def recorded_v1(
        scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: Any
    ) -> None:
        guided = set(grammar_output.structured_output_request_ids)
        names = enumerate(input_batch.req_ids)
        row_of = {name: row for row, name in names if name in guided}
        recorder.around(
            logits, row_of, lambda: apply_v1(scheduler_output, grammar_output, input_batch, logits)
        )

    def recorded_v2(self: Any, logits: Any, batch: Any, guided: list[str], bitmask: Any) -> None:
        row_of = {}
        for number, name in enumerate(batch.req_ids):
            if name in guided:
                row_of[name] = int(batch.cu_num_logits_np[number])
        recorder.around(logits, row_of, lambda: apply_v2(self, logits, batch, guided, bitmask))

    gpu_model_runner.apply_grammar_bitmask = recorded_v1
    StructuredOutputsWorker.apply_grammar_bitmask = recorded_v2
