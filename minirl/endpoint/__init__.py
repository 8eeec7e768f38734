"""The policy over HTTP, as OpenAI's and Anthropic's clients call a model."""

from typing import TYPE_CHECKING

from minirl.config.shared import EndpointConfig
from minirl.data.prompts import Prompts
from minirl.engine.loop import EngineLoop

if TYPE_CHECKING:
    from minirl.endpoint.server import Endpoint


def open_endpoint(engine_loop: EngineLoop, prompts: Prompts, cfg: EndpointConfig) -> "Endpoint":
    """Return an endpoint of this rank's engine: `Endpoint` says what it takes.

    It is slow to import, and only agents need it.
    """
    from minirl.endpoint.server import Endpoint

    return Endpoint(engine_loop, prompts, cfg)
