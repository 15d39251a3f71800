"""Every field of the HTTP API: what it may be, and whether it is honoured, refused, or means nothing here.

Parsing, OpenAPI's schemas and docs/api.md are made from these tables. Sampling parameters are checked by
`types.SamplingParams`; the bounds here must be its own.
"""

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
    meaningless,
    nullable,
    number,
    one_of,
    record,
    refused,
    tagged,
    text,
    whole,
)
from tokenmill.text.messages import MESSAGES
from tokenmill.types import (
    MAX_ALLOWED_IDS,
    MAX_BAD_IDS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_NAME,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TEXTS,
)

MAX_CHOICES_IN_ALL = 1024
MAX_REQUEST_ID = 256
MAX_TTL = 30 * 86400
MAX_TOOLS = 128

NAME = text(1, 128) | {"pattern": "^[a-zA-Z0-9_.:/-]+$"}
TOKEN_IDS = array(whole(0, MAX_INT32), 1)
PROMPT = either(TEXT, array(TEXT, 1, MAX_CHOICES_IN_ALL), TOKEN_IDS, array(TOKEN_IDS, 1, MAX_CHOICES_IN_ALL))
BAD_WORD = either(text(1), array(whole(0, MAX_INT32), 1, MAX_BAD_IDS))
KINDS = {"json": either(OBJECT, TEXT, FLAG), "json_object": FLAG, "regex": TEXT, "choice": array(TEXT, 1, MAX_TEXTS)}
GRAMMAR = record(**KINDS, grammar=TEXT, whitespace_pattern=TEXT, disable_any_whitespace=FLAG)
JSON_SCHEMA = record(["schema"], name=text(1, 64), description=TEXT, schema=OBJECT, strict=FLAG)
FORMAT = either(tagged("text"), tagged("json_object"), tagged("json_schema", "json_schema", json_schema=JSON_SCHEMA))

FUNCTION = record(["name"], name=NAME, description=TEXT, parameters=OBJECT, strict=FLAG)
TOOL = tagged("function", "function", function=FUNCTION)
NAMED_TOOL = tagged("function", "function", function=full(name=TEXT))
ALLOWED_TOOLS = full(mode=one_of("auto", "required"), tools=array(NAMED_TOOL, 1, MAX_TOOLS))
TOOL_CHOICE = either(
    one_of("none", "auto", "required"),
    NAMED_TOOL,
    tagged("allowed_tools", "allowed_tools", allowed_tools=ALLOWED_TOOLS),
)

EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")

SAMPLING = (
    honoured("max_tokens", whole(0, MAX_INT32), "left out: 16 in completions, what fits in chats; 0 with echo"),
    honoured("max_completion_tokens", whole(0, MAX_INT32), "another name of max_tokens"),
    honoured("min_tokens", whole(0, MAX_INT32), "no end before that many"),
    honoured("temperature", number(0, 100), "0 takes the likeliest token"),
    honoured("top_k", whole(-1, MAX_INT32), "0 and -1 keep all"),
    honoured("top_p", number(0, 1)),
    honoured("min_p", number(0, 1)),
    honoured("seed", whole(-(2**63), 2**64 - 1), "choice i of n has seed + i"),
    honoured("n", whole(1, MAX_CHOICES), "prompts times n: at most 1,024; the prompt is computed once"),
    honoured("best_of", whole(1, MAX_CHOICES), "only if it equals n"),
    honoured("stop", either(TEXT, array(text(1), 0, MAX_STOP_STRINGS))),
    honoured("stop_token_ids", array(whole(0, MAX_INT32), 0, MAX_STOP_IDS)),
    honoured("ignore_eos", FLAG),
    honoured("include_stop_str_in_output", FLAG),
    honoured("skip_special_tokens", FLAG),
    honoured(
        "logit_bias",
        OBJECT | {"additionalProperties": number(-100, 100), "maxProperties": MAX_LOGIT_BIAS},
        "token ids as keys",
    ),
    honoured("presence_penalty", number(-2, 2), "for ids in the output"),
    honoured("frequency_penalty", number(-2, 2), "for each time in the output"),
    honoured("repetition_penalty", number(0.01, 100), "for ids in the prompt or the output; 1 changes nothing"),
    honoured("allowed_token_ids", array(whole(0, MAX_INT32), 1, MAX_ALLOWED_IDS), "only these are drawn"),
    honoured("bad_words", array(BAD_WORD, 0, MAX_BAD_WORDS), "texts or sequences of ids that are not generated"),
    refused("length_penalty", "no beam search", 1),
    honoured("structured_outputs", GRAMMAR, "json_object or one of json, regex, choice, grammar; JSON strictly"),
    honoured("response_format", FORMAT, "strict: what of a schema cannot be enforced is refused, else left out"),
    honoured("prompt_logprobs", whole(0, MAX_LOGPROBS), "not for streams; each choice of n computes the prompt"),
    refused("use_beam_search", "no beam search", False),
    refused("pooling", "for embeddings; the flag --pooling says which"),
    refused("truncate_prompt_tokens", "a prompt is never cut"),
    refused("spaces_between_special_tokens", "spaces are the tokenizer's", True),
    refused("return_token_ids", "not built", False),
)
SHARED = (
    honoured("model", TEXT, "404 for any but the served model; left out: that one"),
    honoured("user", text(0, MAX_NAME), "the tenant, for the policy fair; with API keys, key and user together are it"),
    honoured("request_id", text(1, MAX_REQUEST_ID), "printable ASCII; else the header X-Request-Id"),
    honoured("priority", whole(-MAX_INT32, MAX_INT32), "not 0 only with --policy or --eviction priority"),
    honoured("deadline_ms", whole(1, MAX_INT32), "milliseconds from arrival to the end"),
    honoured("timeout", number(0.001, MAX_INT32 // 1000), "the same in seconds"),
    honoured("cache_salt", text(1, MAX_NAME), "only requests of one salt share K/V"),
    honoured("timings", FLAG, "tell where the time went"),
)
COMMON = (
    SHARED,
    honoured("stream", FLAG),
    honoured("stream_options", OBJECT, "for streams only"),
    honoured("stream_options.include_usage", FLAG),
    refused("stream_options.include_obfuscation", "chunks are not padded", False),
    refused("stream_options.continuous_usage_stats", "usage comes last", False),
    refused("store", "nothing is stored", False),
    refused("service_tier", "one tier", "auto", "default"),
    refused("prompt_cache_options", "the prefix cache needs none: see cache_salt and /v1/cache"),
    meaningless("prompt_cache_key prompt_cache_retention", TEXT, "the prefix cache finds prefixes by itself"),
    meaningless("safety_identifier", TEXT, "a label of the client's own"),
    meaningless("metadata", OBJECT, "a label of the client's own"),
)
TEMPLATE = (
    honoured("add_generation_prompt", FLAG, "true unless continue_final_message"),
    honoured("continue_final_message", FLAG, "goes on with the last message, the assistant's"),
    honoured("chat_template_kwargs", OBJECT, "variables of the chat template"),
)
TOOLS = (
    honoured("tools", array(TOOL, 0, MAX_TOOLS), "shown by the chat template, or told in the system's message"),
    honoured("tool_choice", TOOL_CHOICE, "required, a function's name, and strict tools: held to by a grammar"),
    honoured("parallel_tool_calls", FLAG, "false: at most one call, held to by a grammar"),
)
CHAT = Table(
    MESSAGES,
    TOOLS,
    TEMPLATE,
    COMMON,
    SAMPLING,
    honoured("logprobs", FLAG, "as the model finds them, before anything changes the logits"),
    honoured("top_logprobs", whole(0, MAX_LOGPROBS), "only with logprobs"),
    refused("functions", "use tools", []),
    refused("function_call", "use tool_choice", "none", "auto"),
    honoured("reasoning_effort", EFFORT, "where the chat template looks at it; none: also at enable_thinking"),
    honoured(
        "thinking_token_budget", whole(0, MAX_INT32), "then the end of thoughts is forced; where the model thinks"
    ),
    refused("verbosity", "the model has no such setting", "medium"),
    refused("audio prediction web_search_options moderation", "no such service"),
    refused("modalities", "text only", ["text"]),
    refused("prompt suffix", "for completions"),
    refused("echo", "for completions", False),
)
COMPLETION = Table(
    honoured("prompt", PROMPT, "several prompts: choice index = prompt number * n + choice", required=True),
    COMMON,
    SAMPLING,
    honoured("echo", FLAG, "the prompt comes before the output"),
    honoured("logprobs", either(whole(0, MAX_LOGPROBS), one_of(False)), "of the likeliest and the token itself"),
    refused("suffix", "no infilling", ""),
    refused("tools", "for chats", []),
    refused("tool_choice", "for chats", "none", "auto"),
    refused("top_logprobs", "for chats: here logprobs is their number", 0),
    refused("messages reasoning_effort thinking_token_budget", "for chats"),
    meaningless("parallel_tool_calls", FLAG, "for chats"),
)
PROBE = Table(
    honoured("prompt", PROMPT, "a single one; this or messages"),
    honoured("messages", array(OBJECT, 1)),
    MESSAGES[1:],
    TOOLS[:1],
    TEMPLATE,
    honoured("cache_salt", text(1, MAX_NAME)),
)
PIN = Table(PROBE, honoured("ttl", number(0.001, MAX_TTL), "seconds", required=True))
TOKENIZE = Table(
    honoured("model", TEXT),
    honoured("prompt", TEXT, "this or messages"),
    honoured("messages", array(OBJECT, 1)),
    MESSAGES[1:],
    TOOLS[:1],
    TEMPLATE,
    honoured("add_special_tokens", FLAG, "true for a prompt; templates write their own"),
    honoured("return_token_strs", FLAG, "each token as the vocabulary writes it"),
)
DETOKENIZE = Table(honoured("model", TEXT), honoured("tokens", array(whole(0, MAX_INT32)), required=True))
FLUSH = Table(
    honoured("cache_salt", text(1, MAX_NAME), "left out: of all salts"),
    honoured("with_pins", FLAG, "also what is pinned"),
)

EMBEDDING = Table(
    honoured("input", PROMPT, "one or several, as prompt in completions", required=True),
    honoured("encoding_format", one_of("float", "base64"), "base64: of float32, little-endian"),
    honoured("dimensions", whole(1, MAX_INT32), "the first so many numbers, brought to length 1 again"),
    SHARED,
)

COUNT = whole(0)
LOGPROB = number(-9999, 0)
END = one_of("stop", "length", "tool_calls", "abort", None)
USAGE = full(
    prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT, prompt_tokens_details=full(cached_tokens=COUNT)
)
SECONDS = nullable(number(0))
TIMINGS = honoured(
    "timings",
    full(queue=SECONDS, prefill=SECONDS, decode=SECONDS, tokens_per_second=SECONDS),
    "seconds in the scheduler until the first choice began, from there to its first token, and to the last end; "
    "with the field timings or the flag --timings, in a stream's last chunk with a choice",
)
HEAD = (
    given("id", TEXT, "ends in the request's id"),
    given("created", COUNT),
    given("model", TEXT),
    refused("service_tier system_fingerprint moderation", "nothing to tell"),
)
ENDS = (
    given("choices[].index", COUNT),
    given("choices[].finish_reason", END, "abort: cancelled by the server, or at its deadline; null before the end"),
    honoured("choices[].stop_reason", either(TEXT, COUNT), 'the stop string or id that ended it, or "deadline"'),
)
CHAT_TOKEN = full(token=TEXT, logprob=LOGPROB, bytes=array(whole(0, 255)))
CHAT_ENTRY = full(**CHAT_TOKEN["properties"], top_logprobs=array(CHAT_TOKEN, 0, MAX_LOGPROBS))
CHAT_LOGPROBS = honoured("choices[].logprobs", full(content=array(CHAT_ENTRY), refusal=NULL), "null unless asked for")
PROMPT_LOGPROBS = array(nullable(OBJECT))
SHOWN_CALL = full(id=TEXT, type=one_of("function"), function=full(name=TEXT, arguments=TEXT))
CALL_DELTA = record(
    ["index"], index=COUNT, id=TEXT, type=one_of("function"), function=record([], name=TEXT, arguments=TEXT)
)
CHAT_RESPONSE = Table(
    given("object", one_of("chat.completion")),
    HEAD,
    given("choices", array(OBJECT)),
    ENDS,
    CHAT_LOGPROBS,
    honoured("prompt_logprobs", PROMPT_LOGPROBS, "with prompt_logprobs: by token id logprob, rank and decoded_token"),
    given("choices[].message", OBJECT),
    given("choices[].message.role", one_of("assistant")),
    given("choices[].message.content", nullable(TEXT), "null beside calls, if there is no text"),
    honoured("choices[].message.reasoning_content", TEXT, "thoughts"),
    honoured("choices[].message.tool_calls", array(SHOWN_CALL), "whole ones; what is cut or broken is content"),
    meaningless("choices[].message.refusal", NULL, "no refusals apart from content"),
    refused("choices[].message.annotations choices[].message.audio", "text only"),
    refused("choices[].message.function_call", "see tool_calls"),
    refused("metadata", "nothing is stored"),
    given("usage", USAGE),
    TIMINGS,
)
CHAT_CHUNK = Table(
    given("object", one_of("chat.completion.chunk")),
    HEAD,
    given("choices", array(OBJECT), "empty in the chunk of usage"),
    ENDS,
    CHAT_LOGPROBS,
    given("choices[].delta", OBJECT, "empty at the end"),
    honoured("choices[].delta.role", one_of("assistant"), "in the first"),
    honoured("choices[].delta.content", TEXT),
    refused("choices[].delta.audio", "text only"),
    honoured("choices[].delta.reasoning_content", TEXT, "thoughts"),
    honoured("choices[].delta.tool_calls", array(CALL_DELTA), "id, type and name in a call's first, then arguments"),
    refused("choices[].delta.refusal", "no refusals apart from content"),
    refused("choices[].delta.function_call", "see tool_calls"),
    refused("obfuscation", "chunks are not padded"),
    honoured("usage", USAGE, "with include_usage: null but in the last"),
    TIMINGS,
)
COMPLETION_LOGPROBS = full(
    tokens=array(TEXT),
    token_logprobs=array(nullable(LOGPROB)),
    top_logprobs=array(nullable(OBJECT)),
    text_offset=array(COUNT),
)
COMPLETION_RESPONSE = Table(
    given("object", one_of("text_completion")),
    HEAD,
    given("choices", array(OBJECT)),
    ENDS,
    given("choices[].text", TEXT),
    honoured("choices[].logprobs", COMPLETION_LOGPROBS, "null unless asked for; with echo the prompt's come first"),
    honoured("choices[].prompt_logprobs", PROMPT_LOGPROBS, "with prompt_logprobs"),
    honoured("usage", USAGE, "in a stream: with include_usage, null but in the last"),
    TIMINGS,
)
CODE = either(whole(400, 599), one_of("invalid_api_key"))
ERROR = full(error=full(message=TEXT, type=TEXT, param=either(TEXT, NULL), code=CODE))
VECTOR = either(array(number(-1, 1)), TEXT)
EMBEDDING_RESPONSE = Table(
    given("object", one_of("list")),
    given("model", TEXT),
    given("data", array(OBJECT), "one of each input"),
    given("data[].object", one_of("embedding")),
    given("data[].index", COUNT),
    given("data[].embedding", VECTOR, "of length 1"),
    given("usage", full(prompt_tokens=COUNT, total_tokens=COUNT)),
    TIMINGS,
)
