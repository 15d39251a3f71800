// OpenAI's client for Node against a server with a random model of one token a byte: node client.mjs BASE_URL
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 60_000 });
const chats = client.chat.completions;
const LETTERS = Object.fromEntries(Array.from({ length: 26 }, (_, letter) => [68 + letter, 100]));
const messages = [{ role: "user", content: "Add 2 and 3." }];
const GREEDY = { model: "tiny", temperature: 0, max_tokens: 12, logit_bias: LETTERS };
const DIGIT = { type: "integer", minimum: 0, maximum: 9 };
const SCHEMA = {
  type: "object",
  properties: { a: DIGIT, b: DIGIT },
  required: ["a", "b"],
  additionalProperties: false,
};
const TOOL = { type: "function", function: { name: "add", parameters: SCHEMA, strict: true } };
const CALLING = { model: "tiny", temperature: 0, max_tokens: 200, tools: [TOOL], parallel_tool_calls: false };
const NAMED = { type: "function", function: { name: "add" } };

function assertSum(sum) {
  assert.deepEqual(Object.keys(sum).sort(), ["a", "b"]);
  for (const digit of Object.values(sum)) assert.ok(Number.isInteger(digit) && digit >= 0 && digit <= 9);
}

test("chats, whole and streamed, are the same", async () => {
  const whole = await chats.create({ messages, ...GREEDY });
  assert.match(whole.choices[0].message.content, /^[a-z]{12}$/);
  assert.equal(whole.usage.completion_tokens, 12);
  const stream = await chats.create({ messages, stream: true, stream_options: { include_usage: true }, ...GREEDY });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), whole.choices[0].message.content);
  assert.equal(chunks.at(-2).choices[0].finish_reason, "length");
  assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
});

test("completions, whole and streamed, are the same", async () => {
  const whole = await client.completions.create({ prompt: "Once", ...GREEDY });
  let text = "";
  for await (const chunk of await client.completions.create({ prompt: "Once", stream: true, ...GREEDY })) {
    text += chunk.choices[0].text;
  }
  assert.equal(text, whole.choices[0].text);
});

test("a stream that is left does not harm the next request", async () => {
  const stream = await chats.create({ messages, stream: true, ...GREEDY, max_tokens: 30_000 });
  for await (const _ of stream) break;
  assert.equal(stream.controller.signal.aborted, true);
  assert.equal((await chats.create({ messages, ...GREEDY })).choices[0].finish_reason, "length");
});

test("logprobs", async () => {
  const answer = await chats.create({ messages, ...GREEDY, logprobs: true, top_logprobs: 3 });
  const tokens = answer.choices[0].logprobs.content;
  assert.equal(tokens.map((its) => its.token).join(""), answer.choices[0].message.content);
  for (const its of tokens) {
    const tops = its.top_logprobs.map((top) => top.logprob);
    assert.deepEqual(tops, tops.toSorted((one, two) => two - one));
    assert.ok(tops.length === 3 && tops[0] <= 0 && its.logprob <= tops[0]);
  }
});

test("a loop with a tool", async () => {
  const { choices } = await chats.create({ messages, tool_choice: NAMED, ...CALLING });
  const [call] = choices[0].message.tool_calls;
  assert.deepEqual([choices[0].finish_reason, choices[0].message.content], ["tool_calls", null]);
  const { a, b } = JSON.parse(call.function.arguments);
  assertSum({ a, b });
  const result = { role: "tool", tool_call_id: call.id, content: String(a + b) };
  const answer = await chats.create({ ...GREEDY, messages: [...messages, choices[0].message, result], tools: [TOOL] });
  assert.match(answer.choices[0].message.content, /^[a-z]{12}$/);
});

test("a streamed call", async () => {
  const stream = chats.stream({ messages, tool_choice: "required", ...CALLING });
  const whole = await stream.finalChatCompletion();
  const [call] = whole.choices[0].message.tool_calls;
  assert.equal(call.function.name, "add");
  assertSum(call.function.parsed_arguments);
});

test("tools that the client runs", async () => {
  const called = [];
  const run = ({ a, b }) => {
    called.push({ a, b });
    return String(a + b);
  };
  const tool = { type: "function", function: { ...TOOL.function, parse: JSON.parse, function: run } };
  const runner = chats.runTools({ messages, ...CALLING, tools: [tool], tool_choice: NAMED });
  assert.equal(await runner.finalFunctionToolCallResult(), String(called[0].a + called[0].b));
  assertSum(called[0]);
});

test("structured output, whole and streamed", async () => {
  const json_schema = { name: "sum", strict: true, schema: SCHEMA };
  const asked = { model: "tiny", messages, temperature: 2, seed: 1, response_format: { type: "json_schema", json_schema } };
  const { choices } = await chats.create(asked);
  assertSum(JSON.parse(choices[0].message.content));
  assert.equal(choices[0].finish_reason, "stop");
  const streamed = await chats.stream(asked).finalContent();
  assert.equal(streamed, choices[0].message.content);
});

test("responses, whole and streamed", async () => {
  const asked = { model: "tiny", input: "Add 2 and 3.", temperature: 0, max_output_tokens: 16 };
  const whole = await client.responses.create(asked);
  assert.notEqual(whole.output_text, "");
  const streamed = await client.responses.stream(asked).finalResponse();
  assert.equal(streamed.output_text, whole.output_text);
});

test("embeddings", async () => {
  const { data } = await client.embeddings.create({ model: "tiny", input: ["one", "two", "one"] });
  const [one, two, again] = data.map((its) => its.embedding);
  const dot = (left, right) => left.reduce((sum, number, index) => sum + number * right[index], 0);
  assert.ok(Math.abs(dot(one, again) - 1) < 1e-5);
  assert.ok(dot(one, two) < 0.9999);
});

test("models", async () => {
  const { data } = await client.models.list();
  assert.deepEqual(data.map((model) => model.id), ["tiny"]);
  assert.equal((await client.models.retrieve("tiny")).owned_by, "tokenmill");
});

test("errors are the client's own kinds", async () => {
  const refused = async (promise, kind, param) => {
    const error = await promise.then(() => assert.fail("it was answered"), (error) => error);
    assert.ok(error instanceof kind, String(error));
    assert.equal(error.param, param);
    assert.match(error.requestID, /\S/);
  };
  await refused(chats.create({ messages, no_such_field: 1, ...GREEDY }), OpenAI.BadRequestError, "no_such_field");
  await refused(chats.create({ messages, ...GREEDY, temperature: "hot" }), OpenAI.BadRequestError, "temperature");
  await refused(chats.create({ messages, ...GREEDY, model: "nobody" }), OpenAI.NotFoundError, "model");
  await refused(chats.create({ messages, ...CALLING, tools: [], tool_choice: "required" }), OpenAI.BadRequestError, "tool_choice");
  const endless = { prompt: "x".repeat(40_000), stream: true, ...GREEDY };
  await refused(client.completions.create(endless), OpenAI.BadRequestError, "prompt");
});
