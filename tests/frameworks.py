"""Agents of the frameworks that people use, each as its documentation writes one. A row's `mode`
says which. Every episode asks once freely, so that it has tokens to train on."""

import asyncio
import os
from typing import Literal

import anthropic
import openai
from agents import (
    Agent as OpenAIAgent,
)
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from langchain_core.exceptions import OutputParserException
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ValidationError
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.utils import AgentError

from minirl.envs import Agent, Result

os.environ["NO_PROXY"] = "127.0.0.1"
set_tracing_disabled(True)
QUESTION = "left or right?"


class Pick(BaseModel):
    """A choice."""

    choice: Literal["left", "right"]


@function_tool
def go(choice: Literal["left", "right"]) -> str:
    """Go."""
    return f"went {choice}"


@tool
def walk(choice: str) -> str:
    """Go.

    Args:
        choice: left or right
    """
    return f"went {choice}"


async def run_openai_agent(session, model_class):
    """Ask, stream, and demand a tool that ends the run."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        model = model_class(session.model, client)
        free = OpenAIAgent(name="free", instructions="Talk.", model=model)
        await Runner.run(free, QUESTION)
        streamed = Runner.run_streamed(free, QUESTION)
        async for _ in streamed.stream_events():
            pass
        forced = OpenAIAgent(
            name="forced",
            model=model,
            tools=[go],
            model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
            tool_use_behavior="stop_on_first_tool",
        )
        ended = await Runner.run(forced, QUESTION, max_turns=1)
        return str(ended.final_output).removeprefix("went ")


def openai_agents_responses(session):
    return asyncio.run(run_openai_agent(session, OpenAIResponsesModel))


def openai_agents_chat(session):
    return asyncio.run(run_openai_agent(session, OpenAIChatCompletionsModel))


def pydantic_model(session):
    provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
    return OpenAIChatModel(session.model, provider=provider)


def pydantic_ai_text(session):
    agent = PydanticAgent(pydantic_model(session))

    @agent.tool_plain
    def now() -> str:
        """Tell the time."""
        return "noon"

    return agent.run_sync(QUESTION).output


def pydantic_ai_output_type(session):
    model = pydantic_model(session)
    PydanticAgent(model).run_sync(QUESTION)
    return PydanticAgent(model, output_type=Pick, retries=0).run_sync(QUESTION).output.choice


def smolagents_tool_calling(session):
    model = OpenAIServerModel(session.model, api_base=session.base_url, api_key=session.api_key)
    agent = ToolCallingAgent(tools=[walk], model=model, max_steps=1, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Go."
    return str(agent.run(QUESTION))


def langchain_chat(session):
    return ChatOpenAI(model=session.model, base_url=session.base_url, api_key=session.api_key)


def langchain_tools(session):
    return str(langchain_chat(session).bind_tools([Pick]).invoke(QUESTION).content)


def langchain_structured_output(session):
    model = langchain_chat(session)
    model.invoke(QUESTION)
    return model.with_structured_output(Pick).invoke(QUESTION).choice


def openai_client(session):
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        chat = [{"role": "user", "content": QUESTION}]
        reply = client.chat.completions.create(model=session.model, messages=chat)
        return reply.choices[0].message.content


def anthropic_client(session):
    root = session.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=session.api_key) as client:
        chat = [{"role": "user", "content": QUESTION}]
        client.messages.create(model=session.model, messages=chat, max_tokens=100)
        tools = [{"name": "pick", "description": "", "input_schema": Pick.model_json_schema()}]
        forced = client.messages.create(
            model=session.model,
            messages=chat,
            max_tokens=300,
            tools=tools,
            tool_choice={"type": "tool", "name": "pick"},
        )
        return forced.content[0].input["choice"]


# What the policy said was not what the framework wants: a random model may say anything.
OF_THE_POLICY = (
    AgentsException,
    AgentError,
    UnexpectedModelBehavior,
    OutputParserException,
    ValidationError,
    openai.LengthFinishReasonError,
)
# A row of the table in minirl/endpoint/README.md each.
MODES = {
    "openai": openai_client,
    "anthropic": anthropic_client,
    "openai-agents, Responses (its default)": openai_agents_responses,
    "openai-agents, ChatCompletions": openai_agents_chat,
    "pydantic-ai, text and tools": pydantic_ai_text,
    "pydantic-ai, `output_type`": pydantic_ai_output_type,
    "smolagents, ToolCallingAgent": smolagents_tool_calling,
    "langchain-openai, `bind_tools`": langchain_tools,
    "langchain-openai, `with_structured_output`": langchain_structured_output,
}


class Any(Agent):
    """The agent of a row's framework."""

    def run(self, row, session):
        try:
            answer = MODES[row["mode"]](session)
        except OF_THE_POLICY:
            return Result(reward=0.0, info={"picked": 0.0})
        return Result(reward=1.0, info={"picked": float(answer in ("left", "right"))})
