// The official `openai` client for Node.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import {
  answerToResult,
  callsLeft,
  checkClose,
  checkLeft,
  checkPainting,
  colour,
  colourQuestion,
  colours,
  counting,
  facts,
  gathered,
  load,
  notAPicture,
  paintParameters,
  pictureMessage,
  result,
  textMessage,
  tooLong,
} from "./truth.mjs";

const client = new OpenAI({ baseURL: facts.url, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const model = facts.model;
const count = { model, messages: textMessage(counting.question), temperature: 0 };
const look = {
  model,
  messages: pictureMessage(facts.pictures.star, colourQuestion),
  temperature: 0,
};
const endless = { ...count, max_tokens: 1900, ignore_eos: true };
const paint = {
  type: "function",
  function: { name: "paint", description: "Paints the wall.", parameters: paintParameters },
};
const called = { tools: [paint], tool_choice: "required", parallel_tool_calls: false };
const Painting = z.object({ colour: z.enum(colours), bright: z.boolean() });
const chat = client.chat.completions;

const textOf = (chunks) => chunks.map((one) => one.choices[0]?.delta.content ?? "").join("");

test("chat gives the models answer and its usage", async () => {
  const answer = await chat.create(count);
  assert.equal(answer.choices[0].message.content, counting.answer);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.prompt_tokens, counting.prompt_tokens);
  assert.equal(answer.usage.completion_tokens, counting.completion_tokens);
  assert.ok(answer._request_id);
});

test("chat is cut at max_completion_tokens", async () => {
  const answer = await chat.create({ ...count, max_completion_tokens: 4 });
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.ok(counting.answer.startsWith(answer.choices[0].message.content));
  assert.equal(answer.usage.completion_tokens, 4);
});

test("a stream joins to the whole answer and its usage", async () => {
  const options = { stream: true, stream_options: { include_usage: true } };
  const chunks = await gathered(await chat.create({ ...count, ...options }));
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(textOf(chunks), counting.answer);
  const ends = chunks.map((one) => one.choices[0]?.finish_reason).filter(Boolean);
  assert.deepEqual(ends, ["stop"]);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, counting.completion_tokens);
});

test("a stream gathered by the client is the whole answer", async () => {
  const stream = chat.stream(count);
  const answer = await stream.finalChatCompletion();
  assert.equal(answer.choices[0].message.content, counting.answer);
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("a picture is seen", async () => {
  for (const one of facts.sights) {
    const messages = pictureMessage(facts.pictures[one.picture], one.question);
    const answer = await chat.create({ ...look, messages });
    assert.equal(answer.choices[0].message.content, one.answer);
    assert.equal(answer.usage.prompt_tokens, one.prompt_tokens);
  }
});

test("a required tool is called with arguments of its schema", async () => {
  const named = { ...called, tool_choice: { type: "function", function: { name: "paint" } } };
  for (const options of [called, named]) {
    const answer = await chat.create({ ...look, ...options });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    const [call, ...others] = answer.choices[0].message.tool_calls;
    assert.deepEqual(others, []);
    assert.equal(call.function.name, "paint");
    checkPainting(call.function.arguments);
  }
});

test("a tool that need not be called leaves a text", async () => {
  for (const tool_choice of ["none", "auto"]) {
    const answer = await chat.create({ ...look, tools: [paint], tool_choice });
    assert.equal(answer.choices[0].message.content, colour.star);
    assert.equal(answer.choices[0].message.tool_calls, undefined);
  }
});

test("a tool call gathered by the client from a stream is whole", async () => {
  const stream = chat.stream({ ...look, ...called });
  const answer = await stream.finalChatCompletion();
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, "paint");
  checkPainting(call.function.arguments);
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
});

test("a tools result goes back to the model", async () => {
  const { choices } = await chat.create({ ...look, ...called });
  const { message } = choices[0];
  const told = { role: "tool", tool_call_id: message.tool_calls[0].id, content: result };
  const messages = [...look.messages, message, told];
  const answer = await chat.create({ ...look, messages, tools: [paint] });
  assert.equal(answer.choices[0].message.content, answerToResult);
});

test("structured output is parsed", async () => {
  const response_format = zodResponseFormat(Painting, "painting");
  const answer = await chat.parse({ ...look, response_format });
  checkPainting(answer.choices[0].message.parsed);
  const stream = chat.stream({ ...look, response_format });
  checkPainting((await stream.finalChatCompletion()).choices[0].message.parsed);
});

test("structured output that is cut is told as such", async () => {
  const response_format = zodResponseFormat(Painting, "painting");
  await assert.rejects(
    chat.parse({ ...look, response_format, max_tokens: 3 }),
    OpenAI.LengthFinishReasonError ?? /length/i,
  );
});

test("log probabilities are the models", async () => {
  const answer = await chat.create({ ...count, logprobs: true, top_logprobs: 2 });
  const told = answer.choices[0].logprobs.content;
  checkClose(told.map((one) => one.logprob), counting.logprobs);
  assert.ok(told.every((one) => one.top_logprobs.length === 2));
});

test("two choices are answered whole and in a stream", async () => {
  const answer = await chat.create({ ...look, n: 2 });
  assert.deepEqual(answer.choices.map((one) => one.message.content), [colour.star, colour.star]);
  const stream = chat.stream({ ...look, n: 2 });
  const { choices } = await stream.finalChatCompletion();
  assert.deepEqual(choices.map((one) => one.message.content), [colour.star, colour.star]);
});

test("a stream that is left ends the work", async () => {
  let before = await callsLeft();
  const stream = await chat.create({ ...endless, stream: true });
  let seen = 0;
  for await (const _ of stream) if (++seen === 6) break;
  await checkLeft(before);
  before = await callsLeft();
  const aborted = await chat.create({ ...endless, stream: true });
  seen = 0;
  for await (const _ of aborted) if (++seen === 6) aborted.controller.abort();
  assert.ok(seen < 1800, `${seen}`);
  await checkLeft(before);
});

test("a call that is aborted ends the work", async () => {
  const before = await callsLeft();
  const leaving = new AbortController();
  const asking = chat.create(endless, { signal: leaving.signal });
  const failed = assert.rejects(asking, OpenAI.APIUserAbortError);
  while ((await load()).running === 0) await new Promise((resolve) => setTimeout(resolve, 20));
  leaving.abort();
  await failed;
  await checkLeft(before);
});

test("an unknown model is not found", async () => {
  await assert.rejects(chat.create({ ...look, model: "no-such-model" }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.deepEqual([error.status, error.param], [404, "model"]);
    assert.equal(error.code, "model_not_found");
    assert.ok(error.requestID);
    return true;
  });
});

test("a bad picture is a bad request that names its place", async () => {
  for (const stream of [false, true]) {
    const messages = pictureMessage(notAPicture, "?");
    await assert.rejects(chat.create({ ...look, messages, stream }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "messages[0].content[0].image_url.url");
      assert.match(error.code, /^(image_parse_error|unsupported_image_media_type)$/);
      return true;
    });
  }
});

test("a text beyond the context is a bad request", async () => {
  await assert.rejects(chat.create({ ...look, messages: textMessage(tooLong) }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    return true;
  });
});

test("models are listed and retrieved", async () => {
  const [listed, ...others] = await gathered(client.models.list());
  assert.deepEqual(others, []);
  assert.equal(listed.id, model);
  assert.deepEqual({ ...(await client.models.retrieve(model)) }.id, model);
  await assert.rejects(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
});

test("pictures are embedded", async () => {
  const input = [facts.pictures.star, facts.pictures.seven];
  const { data } = await client.embeddings.create({ model, input });
  assert.ok(data[0].embedding.length > 100);
  assert.notDeepEqual(data[0].embedding, data[1].embedding);
  const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
  checkClose([...plain.data[1].embedding], [...data[1].embedding]);
});

test("completions go on with a text", async () => {
  const asked = { model, prompt: "1 2 3", temperature: 0, max_tokens: 6 };
  const whole = await client.completions.create(asked);
  const chunks = await gathered(await client.completions.create({ ...asked, stream: true }));
  assert.ok(whole.choices[0].text);
  assert.equal(chunks.map((one) => one.choices[0].text).join(""), whole.choices[0].text);
});

const respond = { model, temperature: 0, store: false };
const see = [
  {
    role: "user",
    content: [
      { type: "input_image", image_url: facts.pictures.star, detail: "auto" },
      { type: "input_text", text: colourQuestion },
    ],
  },
];
const paintResponses = { type: "function", strict: true, ...paint.function };
const calledResponses = { ...called, tools: [paintResponses] };

test("responses give the models answer whole and in a stream", async () => {
  const asked = { ...respond, input: counting.question };
  const answer = await client.responses.create(asked);
  assert.equal(answer.status, "completed");
  assert.equal(answer.output_text, counting.answer);
  assert.equal(answer.usage.output_tokens, counting.completion_tokens);
  const gatheredByClient = await client.responses.stream(asked).finalResponse();
  assert.equal(gatheredByClient.output_text, counting.answer);
});

test("responses see a picture", async () => {
  assert.equal((await client.responses.create({ ...respond, input: see })).output_text, colour.star);
});

test("responses call a required tool and take its result", async () => {
  const answer = await client.responses.create({ ...respond, input: see, ...calledResponses });
  const [call] = answer.output;
  assert.equal(call.type, "function_call");
  checkPainting(call.arguments);
  const told = { type: "function_call_output", call_id: call.call_id, output: result };
  const input = [...see, call, told];
  const after = await client.responses.create({ ...respond, input, tools: [paintResponses] });
  assert.equal(after.output_text, answerToResult);
});

test("responses are parsed into structured output", async () => {
  const text = { format: zodTextFormat(Painting, "painting") };
  const answer = await client.responses.parse({ ...respond, input: see, text });
  checkPainting(answer.output_parsed);
});

test("responses that are left end the work", async () => {
  const before = await callsLeft();
  const stream = await client.responses.create({
    ...respond,
    input: counting.question,
    max_output_tokens: 1900,
    ignore_eos: true,
    stream: true,
  });
  let seen = 0;
  for await (const _ of stream) if (++seen === 8) break;
  await checkLeft(before);
});
