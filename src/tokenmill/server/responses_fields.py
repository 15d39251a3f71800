"""Every field of /v1/responses; see `fields`."""

from __future__ import annotations

from tokenmill.schema import (
    FLAG,
    NULL,
    OBJECT,
    TEXT,
    Table,
    array,
    either,
    full,
    given,
    honoured,
    nullable,
    one_of,
    record,
    refused,
    tagged,
    text,
    whole,
    without,
)
from tokenmill.server.fields import COMMON, COUNT, EFFORT, MAX_TOOLS, NAME, SAMPLING, TIMINGS
from tokenmill.types import MAX_INT32, MAX_LOGPROBS

WITH_LOGPROBS = "message.output_text.logprobs"
NOT_HERE = (
    "max_tokens max_completion_tokens n best_of prompt_logprobs structured_outputs response_format stream_options"
)

STATUS = one_of("in_progress", "completed", "incomplete")
TEXT_PART = record(
    ["type", "text"],
    type=one_of("input_text", "output_text", "text"),
    text=TEXT,
    annotations=array(OBJECT, 0, 0),
    logprobs=array(OBJECT),
    parsed={},
)
CONTENT = either(TEXT, array(TEXT_PART, 1))
SAME = {"id": TEXT, "status": STATUS}
CALLED = {"call_id": TEXT, "name": TEXT, "arguments": TEXT}
THOUGHT = record(["type", "text"], type=one_of("reasoning_text", "summary_text"), text=TEXT)
ROLES = one_of("user", "assistant", "system", "developer")
ITEM = either(
    record(["role", "content"], type=one_of("message"), role=ROLES, content=CONTENT, **SAME),
    tagged("function_call", "call_id name arguments", **CALLED, parsed_arguments={}, **SAME),
    tagged("function_call_output", "call_id output", call_id=TEXT, output=CONTENT, **SAME),
    tagged("reasoning", summary=array(THOUGHT), content=array(THOUGHT), **SAME),
)
NAMED = tagged("function", "name", name=TEXT)
ALLOWED = {"mode": one_of("auto", "required"), "tools": array(NAMED, 1, MAX_TOOLS)}
CHOICE = either(one_of("none", "auto", "required"), NAMED, tagged("allowed_tools", "mode tools", **ALLOWED))
TOOL = tagged("function", "name", name=NAME, description=TEXT, parameters=OBJECT, strict=FLAG)
SCHEMA = {"name": text(1, 64), "description": TEXT, "schema": OBJECT, "strict": FLAG}
FORMAT = either(tagged("text"), tagged("json_object"), tagged("json_schema", "name schema", **SCHEMA))

RESPONSES = Table(
    honoured(
        "input", either(TEXT, array(ITEM, 1)), "text alone; messages, function calls, their outputs", required=True
    ),
    honoured("instructions", TEXT, "the system's message, before the input"),
    honoured("tools", array(TOOL, 0, MAX_TOOLS), "functions alone"),
    honoured("tool_choice", CHOICE, "as in chats"),
    honoured("parallel_tool_calls", FLAG, "as in chats"),
    honoured("text", OBJECT),
    honoured("text.format", FORMAT, "as response_format in chats"),
    refused("text.verbosity", "the model has no such setting", "medium"),
    honoured("reasoning", OBJECT),
    honoured("reasoning.effort", EFFORT, "as reasoning_effort in chats"),
    refused("reasoning.summary reasoning.generate_summary", "thoughts come whole, as reasoning_text", "auto"),
    refused("reasoning.context", "thoughts are shown as far as the chat template does", "auto"),
    refused("reasoning.mode", "one mode", "standard"),
    honoured("max_output_tokens", whole(1, MAX_INT32), "thoughts and calls included"),
    honoured("top_logprobs", whole(0, MAX_LOGPROBS), "0 unless given; not 0 asks for logprobs as well"),
    honoured(
        "include", array(one_of(WITH_LOGPROBS, "reasoning.encrypted_content"), 0, 8), "thoughts come unencrypted anyway"
    ),
    refused("previous_response_id conversation prompt", "nothing is stored: send the whole input"),
    refused("background", "nothing is stored", False),
    refused("background_options context_management", "nothing is stored"),
    refused("truncation", "a prompt is never cut", "disabled"),
    refused("max_tool_calls", "there are no tools of the server's own"),
    refused("access_programs image moderation", "no such service"),
    honoured("stream_options", OBJECT, "for streams only"),
    refused("stream_options.include_obfuscation", "events are not padded", False),
    without(NOT_HERE, COMMON, SAMPLING),
)

PART = either(
    tagged("output_text", "text annotations logprobs", text=TEXT, annotations=array(OBJECT), logprobs=array(OBJECT)),
    tagged("reasoning_text", "text", text=TEXT),
)
OUTPUT = either(
    full(type=one_of("message"), **SAME, role=one_of("assistant"), content=array(PART)),
    full(type=one_of("function_call"), **SAME, **CALLED),
    full(type=one_of("reasoning"), **SAME, summary=array(OBJECT), content=array(PART)),
)
USAGE = full(
    input_tokens=COUNT,
    input_tokens_details=full(cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=full(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
ECHOED = (
    "instructions max_output_tokens metadata parallel_tool_calls temperature text tool_choice tools top_logprobs top_p"
)
RESPONSE = Table(
    given("id", TEXT, "resp_ and the request's id"),
    given("object", one_of("response")),
    given("created_at", COUNT),
    given("completed_at", nullable(COUNT)),
    given("status", one_of("in_progress", "completed", "incomplete", "failed")),
    given("model", TEXT),
    given(
        "output",
        array(OUTPUT),
        "in a stream's first events empty; of a whole answer, calls that are cut or broken are text",
    ),
    given("usage", nullable(USAGE), "null before the end; cache_write_tokens are those that were not cached"),
    given("error", nullable(full(code=TEXT, message=TEXT)), "with status failed"),
    given(
        "incomplete_details",
        nullable(record(["reason"], reason=one_of("max_output_tokens", "abort", "deadline"))),
        "abort: cancelled by the server",
    ),
    given("store", one_of(False)),
    given("background", one_of(False)),
    given("truncation", one_of("disabled")),
    given("previous_response_id", NULL),
    (given(name, {}, "as asked for, or what counts if it was not") for name in ECHOED.split()),
    given("reasoning", record(["effort", "summary"], effort=nullable(EFFORT), summary=nullable(TEXT))),
    honoured("user", TEXT, "as asked for"),
    honoured("service_tier", TEXT, "as asked for"),
    TIMINGS,
    refused(
        "conversation prompt max_tool_calls moderation image access_programs input_transformations tool_usage", "none"
    ),
    refused(
        "prompt_cache_key prompt_cache_retention prompt_cache_options safety_identifier", "labels of the client's own"
    ),
    refused("prompt_cache_diagnostics", "see /v1/cache"),
)
