// What each client's tests ask, and what the demo model answers; see `tests/clients/facts.py`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const facts = JSON.parse(readFileSync(process.env.CHIASM_CLIENTS_FACTS, "utf8"));
export const counting = facts.counting;
export const sight = (picture) => facts.sights.find((one) => one.picture === picture);
export const tooLong = "word ".repeat(facts.context_length);
export const notAPicture = "data:image/png;base64,SGVsbG8gV29ybGQ=";
export const colourQuestion = "What colour is it?";
export const colour = { star: "orange", seven: "green" };
export const colours = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"];
// What a tool gives back: the model, which knows no tools, answers it as a question.
export const result = colourQuestion;
export const answerToResult = colour.star;

const SETTLE_MS = 10_000;

// Calls of it end soon, whatever a model writes: all of its values are short.
export const paintParameters = {
  type: "object",
  properties: { colour: { enum: colours }, bright: { type: "boolean" } },
  required: ["colour", "bright"],
  additionalProperties: false,
};

export function textMessage(text) {
  return [{ role: "user", content: text }];
}

export function pictureMessage(url, text) {
  const picture = { type: "image_url", image_url: { url } };
  return [{ role: "user", content: [picture, { type: "text", text }] }];
}

// Holds a call of `paint` against its schema, and that the model saw the star's colour.
export function checkPainting(given) {
  const painting = typeof given === "string" ? JSON.parse(given) : given;
  assert.deepEqual(Object.keys(painting).sort(), ["bright", "colour"]);
  assert.equal(painting.colour, colour.star);
  assert.equal(typeof painting.bright, "boolean");
}

export async function load() {
  return (await fetch(facts.load_url)).json();
}

// How many calls the gateway has seen its clients leave.
export async function callsLeft() {
  const told = await (await fetch(new URL("/metrics", facts.url))).text();
  const calls = told.split("\n").filter((line) => line.startsWith("chiasm_gateway_requests_total"));
  const left = calls.filter((line) => line.includes('reason="CANCELLED"'));
  return left.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

// Holds that one more call was left than `before`, and that nothing is generated for it.
export async function checkLeft(before) {
  const deadline = Date.now() + SETTLE_MS;
  for (;;) {
    const [left, now] = [await callsLeft(), await load()];
    if (left === before + 1 && now.active === 0 && now.running === 0) return;
    assert.ok(Date.now() < deadline, `${left - before} ${JSON.stringify(now)}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

export function checkClose(told, expected) {
  assert.equal(told.length, expected.length);
  told.forEach((one, place) => assert.ok(Math.abs(one - expected[place]) < 1e-3, `at ${place}`));
}

export async function gathered(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}
