/** How an answer came about: each picture's path, the tokens, and a timeline of the stages. */

import { placedPictures } from "./conversation.js";
import { el } from "./dom.js";
import { thumbnail } from "./pictures.js";
import { count, counted, duration } from "./words.js";

const STAGES = ["queue", "encode", "transfer", "prefill", "decode"];
const MEANING = {
  queue: "waiting for its turn",
  encode: "the encoder looks at the picture",
  transfer: "the embedding travels",
  prefill: "the model reads the prompt",
  decode: "the model writes",
  other: "checking, tokenizing and whatever has no stage of its own",
};

/** The stages that took time, in order, with what no stage accounts for. */
export function stagesOf(timings) {
  const stages = STAGES.map((name) => ({ name, ms: timings[`${name}_ms`] ?? 0 }));
  const known = stages.reduce((sum, stage) => sum + stage.ms, 0);
  const other = Math.max(0, (timings.total_ms ?? 0) - known);
  return [...stages, { name: "other", ms: other }];
}

/** All of it. `scaleMs`: the time that fills the bar, to compare bars; the answer's own without. */
export function traceView(result, question, scaleMs) {
  const { trace, usage } = result;
  const parts = [
    trace?.images.length ? pathsView(trace.images, question) : null,
    trace ? timelineView(trace.timings, scaleMs) : null,
    usage ? tokensView(usage, result) : null,
  ].filter(Boolean);
  return el("div", { class: "trace", role: "group", "aria-label": "How this answer came about" }, parts);
}

function pathsView(images, question) {
  const placed = placedPictures(question);
  const rows = images.map((image) => {
    const found = placed.find(({ message, part }) => message === image.message && part === image.part);
    return pathView(image, found?.picture);
  });
  return el("ul", { class: "paths", "aria-label": "Pictures" }, rows);
}

function pathView(image, picture) {
  const [title, note] = pathOf(image);
  const facts = [note, counted(image.tokens, "token"), image.identity_checked ? null : "origin not checked"];
  return el("li", { "data-source": image.source },
    picture ? thumbnail(picture, 36, picture.name) : el("span", { class: "thumb kind" }, "?"),
    el("div", {}, el("strong", {}, title), el("span", { class: "muted" }, facts.filter(Boolean).join(", "))),
  );
}

function pathOf({ source, encoder, encoder_cache_hit: hit }) {
  const who = !encoder || encoder === "encoder" ? "the encoder" : `encoder ${encoder}`;
  const paths = {
    cache: ["Known already", "from the LLM service's cache"],
    remote: hit ? ["From an encoder's cache", `kept by ${who}`] : ["Encoded now", `by ${who}`],
    local: ["Encoded now", "in the LLM service itself"],
    caller: ["Embedding of yours", "sent with the request"],
    reference: ["By reference", "held by the LLM service"],
  };
  return paths[source] ?? [source, ""];
}

function timelineView(timings, scaleMs) {
  const stages = stagesOf(timings).filter(({ ms }) => ms > 0);
  const said = stages.map(({ name, ms }) => `${name} ${duration(ms)}`).join(", ");
  const total = timings.total_ms ?? 0;
  return el("div", { class: "timeline" },
    el("div", { class: "bar-head" }, el("span", {}, "In the service"), el("strong", {}, duration(total))),
    el("div", { class: "stages", role: "img", "aria-label": `Timeline: ${said}` }, barsOf(stages, total, scaleMs)),
    el("ul", { class: "legend" }, stages.map(legendOf)),
  );
}

function barsOf(stages, total, scaleMs) {
  const bars = stages.map(({ name, ms }) => bar(name, ms, `${name}: ${duration(ms)}, ${MEANING[name]}`));
  return scaleMs > total ? [...bars, bar("rest", scaleMs - total)] : bars;
}

function bar(name, ms, title) {
  const made = el("span", { class: `stage ${name}`, title });
  made.style.flexGrow = ms;
  return made;
}

function legendOf({ name, ms }) {
  return el("li", { title: MEANING[name] },
    el("span", { class: `dot ${name}` }), el("span", {}, name), el("span", { class: "figure" }, duration(ms)));
}

function tokensView(usage, { trace, firstMs }) {
  const details = usage.prompt_tokens_details ?? {};
  const rows = [
    ["Read", counted(usage.prompt_tokens, "token"), partsOf(details)],
    ["Written", counted(usage.completion_tokens, "token"), paceOf(usage, trace, firstMs)],
  ];
  return el("dl", { class: "tokens" }, rows.map(([name, figure, note]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, `${figure} `, note ? el("span", { class: "muted" }, note) : null))));
}

/** When the first text was here, and how fast the rest was written where there are enough of it. */
function paceOf({ completion_tokens: written }, trace, firstMs) {
  const decodeMs = trace?.timings.decode_ms;
  const pace = written > 8 && decodeMs ? `${count(Math.round(((written - 1) * 1000) / decodeMs))} a second` : null;
  return [firstMs == null ? null : `first after ${duration(firstMs)}`, pace].filter(Boolean).join(", ");
}

function partsOf({ image_tokens: image, text_tokens: text, cached_tokens: cached }) {
  const parts = [[image, "picture"], [text, "text"], [cached, "cached"]];
  return parts.filter(([number]) => number != null).map(([number, of]) => `${count(number)} ${of}`).join(", ");
}
