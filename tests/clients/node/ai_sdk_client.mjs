// The Vercel AI SDK by its two providers: any compatible server's, and OpenAI's own.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError,
  Output,
  embedMany,
  generateText,
  isStepCount,
  streamText,
  tool,
} from "ai";
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
  notAPicture,
  result,
  tooLong,
} from "./truth.mjs";

const server = { baseURL: facts.url, apiKey: "none" };
const any = { ...server, name: "chiasm", includeUsage: true, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible(any);
const official = createOpenAI(server);
const models = {
  "the compatible provider": compatible(facts.model),
  "the official provider": official.chat(facts.model),
  "the official provider by responses": official.responses(facts.model),
};
// Not all of these have a setting that forbids the answer's end.
const endlessly = (url, init) =>
  fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), ignore_eos: true }) });
const endless = {
  "the compatible provider": createOpenAICompatible({ ...any, fetch: endlessly })(facts.model),
  "the official provider": createOpenAI({ ...server, fetch: endlessly }).chat(facts.model),
  "the official provider by responses": createOpenAI({ ...server, fetch: endlessly }).responses(
    facts.model,
  ),
};
const Painting = z.object({ colour: z.enum(colours), bright: z.boolean() });

function settings(model, more) {
  return { model, temperature: 0, maxRetries: 0, ...more };
}

function looking(picture, text = colourQuestion) {
  const image = { type: "file", mediaType: "image/png", data: facts.pictures[picture] };
  return [{ role: "user", content: [image, { type: "text", text }] }];
}

function painter(called) {
  return tool({
    description: "Paints the wall.",
    inputSchema: Painting,
    execute: async (painting) => {
      called.push(painting);
      return result;
    },
  });
}

for (const [by, model] of Object.entries(models)) {
  test(`chat by ${by} gives the models answer and its usage`, async () => {
    const answer = await generateText(settings(model, { prompt: counting.question }));
    assert.equal(answer.text, counting.answer);
    assert.equal(answer.finishReason, "stop");
    assert.equal(answer.usage.inputTokens, counting.prompt_tokens);
    assert.equal(answer.usage.outputTokens, counting.completion_tokens);
  });

  test(`a stream by ${by} joins to the whole answer and its usage`, async () => {
    const stream = streamText(settings(model, { prompt: counting.question }));
    const texts = await gathered(stream.textStream);
    assert.ok(texts.length > 10);
    assert.equal(texts.join(""), counting.answer);
    assert.equal(await stream.finishReason, "stop");
    assert.equal((await stream.usage).outputTokens, counting.completion_tokens);
  });

  test(`a picture by ${by} is seen`, async () => {
    for (const picture of ["star", "seven"]) {
      const answer = await generateText(settings(model, { messages: looking(picture) }));
      assert.equal(answer.text, colour[picture]);
    }
  });

  test(`a tool by ${by} is called and its result goes back to the model`, async () => {
    const called = [];
    const answer = await generateText(
      settings(model, {
        messages: looking("star"),
        tools: { paint: painter(called) },
        stopWhen: isStepCount(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
      }),
    );
    assert.equal(answer.steps[0].finishReason, "tool-calls");
    assert.ok(called.length >= 1);
    checkPainting(called[0]);
    assert.equal(answer.text, answerToResult);
  });

  test(`a tool by ${by} is called in a stream`, async () => {
    const called = [];
    const stream = streamText(
      settings(model, {
        messages: looking("star"),
        tools: { paint: painter(called) },
        toolChoice: { type: "tool", toolName: "paint" },
      }),
    );
    const parts = await gathered(stream.stream);
    const kinds = new Set(parts.map((part) => part.type));
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) {
      assert.ok(kinds.has(kind), kind);
    }
    checkPainting(called[0]);
    assert.equal(await stream.finishReason, "tool-calls");
  });

  test(`structured output by ${by} is parsed`, async () => {
    const output = Output.object({ schema: Painting });
    const answer = await generateText(settings(model, { messages: looking("star"), output }));
    checkPainting(answer.output);
  });

  test(`structured output by ${by} grows in a stream`, async () => {
    const output = Output.object({ schema: Painting });
    const stream = streamText(settings(model, { messages: looking("star"), output }));
    const partial = await gathered(stream.partialOutputStream);
    assert.ok(partial.length > 1);
    checkPainting(partial.at(-1));
    checkPainting(await stream.output);
  });

  test(`structured output by ${by} that is cut is told as such`, async () => {
    const output = Output.object({ schema: Painting });
    const asked = { messages: looking("star"), output, maxOutputTokens: 3 };
    await assert.rejects(
      async () => (await generateText(settings(model, asked))).output,
      (error) => {
        assert.match(error.name, /NoObjectGenerated|NoOutputGenerated/);
        return true;
      },
    );
  });

  test(`a stream by ${by} that is left ends the work`, async () => {
    const before = await callsLeft();
    const leaving = new AbortController();
    const asked = { prompt: counting.question, abortSignal: leaving.signal, onError() {} };
    const stream = streamText(settings(endless[by], asked));
    let seen = 0;
    for await (const part of stream.stream) {
      if (part.type === "text-delta" && ++seen === 3) {
        leaving.abort();
      }
    }
    assert.ok(seen < 1800, `${seen}`);
    await checkLeft(before);
  });

  test(`a bad picture by ${by} is a bad request that names its place`, async () => {
    const image = { type: "file", mediaType: "image/png", data: notAPicture };
    const messages = [{ role: "user", content: [image] }];
    await assert.rejects(generateText(settings(model, { messages })), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 400);
      assert.equal(error.isRetryable, false);
      assert.match(JSON.parse(error.responseBody).error.param, /content\[0\]/);
      return true;
    });
  });

  test(`a text beyond the context by ${by} is a bad request`, async () => {
    await assert.rejects(generateText(settings(model, { prompt: tooLong })), (error) => {
      assert.equal(error.statusCode, 400);
      assert.equal(JSON.parse(error.responseBody).error.code, "context_length_exceeded");
      assert.equal(error.message, JSON.parse(error.responseBody).error.message);
      return true;
    });
  });
}

test("an unknown model is not found", async () => {
  const unknown = [
    compatible("no-such-model"),
    official.chat("no-such-model"),
    official.responses("no-such-model"),
  ];
  for (const model of unknown) {
    await assert.rejects(generateText(settings(model, { prompt: "Hello" })), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 404);
      assert.equal(JSON.parse(error.responseBody).error.code, "model_not_found");
      return true;
    });
  }
});

test("log probabilities are the models", async () => {
  const answer = await generateText(
    settings(models["the official provider"], {
      prompt: counting.question,
      providerOptions: { openai: { logprobs: 2 } },
    }),
  );
  const told = answer.providerMetadata.openai.logprobs;
  checkClose(told.map((one) => one.logprob), counting.logprobs);
});

test("pictures are embedded", async () => {
  const values = [facts.pictures.star, facts.pictures.seven];
  for (const model of [
    compatible.embeddingModel(facts.model),
    official.embeddingModel(facts.model),
  ]) {
    const { embeddings } = await embedMany({ model, values, maxRetries: 0 });
    assert.ok(embeddings[0].length > 100);
    assert.notDeepEqual(embeddings[0], embeddings[1]);
  }
});
