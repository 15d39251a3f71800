"""Every field of /v1/messages and /v1/messages/count_tokens; see `fields`."""

from __future__ import annotations

from tokenmill.schema import (
    FLAG,
    OBJECT,
    TEXT,
    Table,
    array,
    either,
    full,
    given,
    honoured,
    meaningless,
    nullable,
    one_of,
    record,
    refused,
    tagged,
    text,
    whole,
    without,
)
from tokenmill.server.fields import COMMON, COUNT, EFFORT, MAX_TOOLS, NAME, SAMPLING
from tokenmill.types import MAX_INT32, MAX_NAME, MAX_STOP_STRINGS

NO_EFFECT = "the prefix cache finds prefixes by itself"
NOT_HERE = (
    "max_tokens max_completion_tokens n best_of prompt_logprobs structured_outputs response_format stream_options stop "
    "user metadata service_tier store prompt_cache_options prompt_cache_key prompt_cache_retention safety_identifier"
)
CACHE = {"cache_control": OBJECT}
TEXT_BLOCK = tagged("text", "text", text=TEXT, **CACHE)
TEXTS = either(TEXT, array(TEXT_BLOCK))
BLOCK = either(
    TEXT_BLOCK,
    tagged("tool_use", "id name input", id=TEXT, name=TEXT, input=OBJECT, caller=OBJECT, **CACHE),
    tagged("tool_result", "tool_use_id", tool_use_id=TEXT, content=TEXTS, is_error=FLAG, **CACHE),
    tagged("thinking", "thinking", thinking=TEXT, signature=TEXT),
)
MESSAGE = full(role=one_of("user", "assistant"), content=either(TEXT, array(BLOCK, 1)))
TOOL = record(
    ["name", "input_schema"],
    type=one_of("custom"),
    name=NAME,
    description=TEXT,
    input_schema=OBJECT,
    strict=FLAG,
    **CACHE,
)
PARALLEL = {"disable_parallel_tool_use": FLAG}
CHOICE = either(
    record(["type"], type=one_of("auto", "any"), **PARALLEL),
    tagged("none"),
    tagged("tool", "name", name=TEXT, **PARALLEL),
)
FULL = {"display": one_of("full")}
THINKING = either(
    tagged("enabled", "budget_tokens", budget_tokens=whole(1, MAX_INT32), **FULL),
    tagged("adaptive", **FULL),
    tagged("disabled"),
)
PROMPT = (
    honoured(
        "messages",
        array(MESSAGE, 1),
        "text, tool_use, tool_result, thinking; a last one of the assistant goes on",
        required=True,
    ),
    honoured("system", TEXTS),
    honoured("tools", array(TOOL, 0, MAX_TOOLS), "the client's own alone"),
    honoured("tool_choice", CHOICE, "any, tool, one call at most and strict tools: held to by a grammar"),
    honoured("thinking", THINKING, "where the model thinks; budget_tokens ends the thoughts"),
    honoured("output_config", OBJECT),
    honoured(
        "output_config.format",
        tagged("json_schema", "schema", schema=OBJECT),
        "what of a schema cannot be enforced is refused",
    ),
    honoured("output_config.effort", EFFORT, "as reasoning_effort in chats"),
    refused("output_config.task_budget", "no such service"),
    meaningless("cache_control", OBJECT, NO_EFFECT),
    refused("speed", "one speed", "standard"),
    refused("user_profile_id workspace_id", "no such service"),
)
MESSAGES = Table(
    PROMPT,
    honoured("max_tokens", whole(1, MAX_INT32), required=True),
    honoured("stop_sequences", array(text(1), 0, MAX_STOP_STRINGS)),
    honoured("metadata", OBJECT),
    honoured("metadata.user_id", text(0, MAX_NAME), "the tenant, for the policy fair"),
    refused("service_tier", "one tier", "auto", "standard_only"),
    refused("container diagnostics inference_geo mcp_servers context_management", "no such service"),
    without(NOT_HERE, COMMON, SAMPLING),
)
COUNT_TOKENS = Table(PROMPT, honoured("model", TEXT))

USAGE = full(input_tokens=COUNT, cache_read_input_tokens=COUNT, cache_creation_input_tokens=COUNT, output_tokens=COUNT)
SHOWN_BLOCK = either(
    tagged("text", "text", text=TEXT),
    tagged("tool_use", "id name input", id=TEXT, name=TEXT, input=OBJECT),
    tagged("thinking", "thinking signature", thinking=TEXT, signature=TEXT),
)
STOP_REASON = one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn")
MESSAGE_RESPONSE = Table(
    given("id", TEXT, "msg_ and the request's id"),
    given("type", one_of("message")),
    given("role", one_of("assistant")),
    given("model", TEXT),
    given("content", array(SHOWN_BLOCK), "thoughts are not signed"),
    given("stop_reason", nullable(STOP_REASON), "pause_turn: cancelled by the server, or at the deadline"),
    given("stop_sequence", nullable(TEXT)),
    given("usage", USAGE, "input_tokens are those that were not cached"),
    honoured("timings", OBJECT, "as in chats"),
    refused("container diagnostics stop_details", "no such service"),
)
COUNT_RESPONSE = Table(given("input_tokens", COUNT))
MESSAGE_ERROR = tagged("error", "error", error=full(type=TEXT, message=TEXT))
