/** Speaks to the gateway that served this page. */

import { Failure, failureOf } from "./failure.js";
import { eventsOf } from "./sse.js";

const KEY = "chiasm.key";

/** The API key, for as long as this tab lives. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** Where the API begins, whatever stands before the gateway. */
export const baseUrl = () => new URL("v1", document.baseURI).href;

/** The models that are served. */
export async function listModels() {
  return (await (await call("models")).json()).data;
}

/** Has the service hold the pictures of `parts`; their references, in order. */
export async function holdPictures(model, parts, signal) {
  const body = JSON.stringify({ model, input: parts });
  return (await (await call("image_embeddings", { body, signal })).json()).data;
}

/**
 * Asks, and hands each piece of text to `onText`. The result: text, finish, usage, trace (the
 * answer's `chiasm` object, or null), requestId, sentBytes, firstMs and totalMs as seen from here.
 */
export async function streamChat(request, { signal, onText }) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const began = performance.now();
  const response = await call("chat/completions", { body, signal });
  const requestId = response.headers.get("x-request-id") ?? "";
  const result = { text: "", finish: null, usage: null, trace: null, requestId, firstMs: null };
  const take = (text) => {
    result.firstMs ??= performance.now() - began;
    result.text += text;
    onText(text);
  };
  await readChunks(response, result, take);
  return { ...result, sentBytes: new Blob([body]).size, totalMs: performance.now() - began };
}

async function readChunks(response, result, take) {
  const { requestId } = result;
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      readChunk(JSON.parse(data), result, take);
    }
  } catch (fault) {
    if (fault instanceof Failure || fault.name === "AbortError") throw fault;
  }
  throw new Failure("The connection ended before the answer did.", { code: "answer_broke_off", requestId });
}

function readChunk(chunk, result, take) {
  if (chunk.error) {
    const { message, param, code } = chunk.error;
    // The status of the answer was said before; what failed then failed in the service.
    throw new Failure(message, { status: 500, param, code, requestId: result.requestId });
  }
  result.usage = chunk.usage ?? result.usage;
  result.trace = chunk.chiasm ?? result.trace;
  const [choice] = chunk.choices;
  result.finish = choice?.finish_reason ?? result.finish;
  if (choice?.delta.content) take(choice.delta.content);
}

async function call(path, { body, signal } = {}) {
  const headers = body ? { "content-type": "application/json" } : {};
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  const response = await fetch(`${baseUrl()}/${path}`, { method: body ? "POST" : "GET", headers, body, signal }).catch(noAnswer);
  if (!response.ok) throw await failureOf(response);
  return response;
}

function noAnswer(fault) {
  if (fault.name === "AbortError") throw fault;
  throw new Failure("There was no answer at all; the connection failed.");
}
