/** The same question twice: with the raw pictures, and with their embeddings by reference. */

import { holdPictures } from "./api.js";
import { AnswerView } from "./answer.js";
import { bodyOf, placedPictures, rawPart, referencePart } from "./conversation.js";
import { el, say } from "./dom.js";
import { bytes, counted, duration } from "./words.js";

// The same draws on both sides, whatever the temperature.
const SEED = 1;

export class ComparisonView {
  constructor(onGrowth) {
    this.raw = new Side("Raw picture", onGrowth);
    this.embedded = new Side("Embedding by reference", onGrowth);
    this.sides = [this.raw, this.embedded];
    this.verdict = el("p", { class: "verdict" });
    this.element = el("div", { class: "comparison", role: "group", "aria-label": "Raw picture and embedding compared" },
      this.verdict, el("div", { class: "sides" }, this.sides.map((side) => side.element)));
  }

  /** Asks both, one after the other, so that neither takes time from the other. */
  async run(question, signal, retry) {
    const asking = { question, salt: randomText(), options: { signal, retry } };
    for (const side of this.sides) side.begin();
    const compared = (await this.askRaw(asking)) && (await this.askEmbedded(asking));
    for (const side of this.sides) side.answer.end();
    if (compared) this.conclude();
    else this.judge("Not compared");
  }

  async askRaw({ question, salt, options }) {
    this.judge("Asking with the raw picture");
    const body = comparable(question, rawPart, `${salt}-raw`);
    if (!(await this.raw.answer.ask(question, body, options))) return false;
    this.raw.tell();
    return true;
  }

  async askEmbedded({ question, salt, options }) {
    this.judge("Making the embedding, then asking with it");
    const began = performance.now();
    const held = await this.hold(question, options);
    if (!held) return false;
    const made = duration(performance.now() - began);
    const partOf = (picture) => referencePart(held.get(picture).reference);
    const body = comparable(question, partOf, `${salt}-embedded`);
    if (!(await this.embedded.answer.ask(question, body, options))) return false;
    const rows = [...held.values()].reduce((sum, one) => sum + one.row_count, 0);
    this.embedded.tell(`${counted(rows, "row")} made before in ${made}`);
    return true;
  }

  /** The held embedding of each picture; null if there is none to be had. */
  async hold(question, { signal, retry }) {
    const pictures = [...new Set(placedPictures(question).map(({ picture }) => picture))];
    try {
      const held = await holdPictures(question.model, pictures.map(rawPart), signal);
      return new Map(pictures.map((picture, number) => [picture, held[number]]));
    } catch (fault) {
      if (fault.name === "AbortError") this.embedded.answer.note("Stopped.");
      else this.embedded.answer.fail(fault, retry);
      return null;
    }
  }

  conclude() {
    const answers = this.sides.map((side) => side.answer);
    const slower = Math.max(...answers.map(({ result }) => result.trace?.timings.total_ms ?? 0));
    for (const answer of answers) answer.rescale(slower);
    const same = answers[0].text === answers[1].text;
    this.judge(same ? "The same text, character for character" : "The texts differ", same ? "same" : "apart");
    say(this.verdict.textContent);
  }

  judge(text, kind = "") {
    this.verdict.textContent = text;
    this.verdict.dataset.kind = kind;
  }
}

class Side {
  constructor(title, onGrowth) {
    this.answer = new AnswerView(onGrowth);
    this.fact = el("p", { class: "muted sent" });
    this.element = el("article", { class: "side" },
      el("h2", {}, title), this.fact, this.answer.element, this.answer.aside);
  }

  begin() {
    this.fact.textContent = "";
    this.answer.begin();
  }

  tell(more) {
    const { sentBytes, totalMs } = this.answer.result;
    const facts = [`sent ${bytes(sentBytes)}`, `answered here in ${duration(totalMs)}`, more];
    this.fact.textContent = facts.filter(Boolean).join(", ");
  }
}

/** Separate salts: neither answer finds what the other has computed of the prompt. */
const comparable = (question, partOf, salt) => ({ ...bodyOf(question, partOf), seed: SEED, cache_salt: salt });

const randomText = () =>
  [...crypto.getRandomValues(new Uint32Array(3))].map((word) => word.toString(36)).join("");
