/** One answer on the page: its text as it comes, then how it came about, or why it did not. */

import { streamChat } from "./api.js";
import { el, say } from "./dom.js";
import { failureView } from "./failure_view.js";
import { loadModels } from "./settings.js";
import { traceView } from "./trace.js";
import { counted } from "./words.js";

const CUT = { length: "Cut at the most tokens that were asked for.", tool_calls: "The model called a tool." };

export class AnswerView {
  /** `onGrowth(element)` hears when the text in `element` has grown. */
  constructor(onGrowth) {
    this.onGrowth = onGrowth;
    this.words = el("p", { class: "words" });
    this.after = el("div");
    this.element = el("div", { class: "answer" }, this.words, this.after);
    this.aside = el("div", { class: "aside" });
    this.question = null;
    this.result = null;
  }

  /** What came of it so far. */
  get text() {
    return this.words.textContent;
  }

  /**
   * Asks `body` for the question and shows what comes. True if there is an answer in the end.
   * `retry` is offered where there is none.
   */
  async ask(question, body, { signal, retry }) {
    this.question = question;
    this.begin();
    try {
      this.finish(await streamChat(body, { signal, onText: (text) => this.append(text) }));
      return true;
    } catch (fault) {
      if (fault.name === "AbortError") this.note("Stopped.");
      else this.fail(fault, retry);
      return false;
    } finally {
      this.end();
    }
  }

  /** Empties it and shows that something is to come. */
  begin() {
    this.result = null;
    for (const part of [this.words, this.after, this.aside]) part.replaceChildren();
    this.element.setAttribute("aria-busy", "true");
    this.element.classList.add("waiting");
    this.onGrowth(this.element);
  }

  /** Nothing more is to come. */
  end() {
    this.element.removeAttribute("aria-busy");
    this.element.classList.remove("waiting");
    this.onGrowth(this.element);
  }

  /** Shows a failure, its own or of what had to come before it. */
  fail(failure, retry) {
    this.after.replaceChildren(failureView(failure, retry));
    if (failure.code === "model_not_found") loadModels().catch(() => {});
  }

  /** Draws the trace anew, so that a bar of `scaleMs` would be full. */
  rescale(scaleMs) {
    this.aside.replaceChildren(traceView(this.result, this.question, scaleMs));
  }

  append(text) {
    this.element.classList.remove("waiting");
    this.words.append(text);
    this.onGrowth(this.element);
  }

  finish(result) {
    this.result = result;
    if (!result.text) this.note("The model answered with no text.");
    if (CUT[result.finish]) this.note(CUT[result.finish]);
    this.aside.replaceChildren(traceView(result, this.question));
    say(result.usage ? `Answered in ${counted(result.usage.completion_tokens, "token")}.` : "Answered.");
  }

  note(text) {
    this.after.append(el("p", { class: "muted note" }, text));
    say(text);
  }
}
