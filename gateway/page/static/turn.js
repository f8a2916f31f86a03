/** A question on the page with what was answered, and what can be done with both. */

import { AnswerView } from "./answer.js";
import { ComparisonView } from "./comparison.js";
import { bodyOf, placedPictures } from "./conversation.js";
import { asCurl, asPython, copyText } from "./copying.js";
import { button, el, toast } from "./dom.js";
import { thumbnail } from "./pictures.js";
import { settingsNow } from "./settings.js";

export class TurnView {
  /** `start(work)` runs `work(signal)` as the one thing under way. */
  constructor(question, { start, onGrowth }) {
    this.question = question;
    this.start = start;
    this.onGrowth = (grown) => onGrowth(this.element, grown);
    this.answer = new AnswerView(this.onGrowth);
    this.comparison = null;
    this.actions = el("div", { class: "actions" }, this.actionsOf());
    this.main = el("div", { class: "main" }, askedView(question));
    this.element = el("article", { class: "turn" }, this.main);
  }

  /** The turn as later requests tell it; null while there is no answer. */
  get past() {
    const { text, pictures } = this.question;
    const answer = this.answer.text || this.comparison?.raw.answer.text;
    return answer ? { text, pictures, answer } : null;
  }

  /** Asks once. */
  ask() {
    if (!this.answer.element.isConnected) {
      this.main.append(this.answer.element, this.actions);
      this.element.append(this.answer.aside);
    }
    const retry = () => this.renew().ask();
    return this.start((signal) => this.answer.ask(this.question, bodyOf(this.question), { signal, retry }));
  }

  /** Asks twice, below what is there already. */
  compare() {
    if (!this.comparison) {
      this.comparison = new ComparisonView(this.onGrowth);
      this.element.append(this.comparison.element);
      if (!this.actions.isConnected) this.element.append(this.actions);
    }
    const retry = () => this.renew().compare();
    return this.start((signal) => this.comparison.run(this.question, signal, retry));
  }

  /** The same question under the settings of now: what failed may need another model or key. */
  renew() {
    this.question = Object.freeze({ ...this.question, ...settingsNow() });
    return this;
  }

  actionsOf() {
    const compare = button("Compare raw with embedding", () => this.compare());
    return [
      button("Copy as curl", () => copy(asCurl(this.question), "curl command")),
      button("Copy as Python", () => copy(asPython(this.question), "Python program")),
      placedPictures(this.question).length ? compare : null,
    ];
  }
}

function askedView({ text, pictures }) {
  const shown = pictures.map((picture) =>
    el("li", { title: picture.name }, thumbnail(picture, 76), el("span", { class: "name" }, picture.name)));
  return el("div", { class: "asked" },
    shown.length ? el("ul", { "aria-label": "Pictures" }, shown) : null,
    text ? el("p", {}, text) : null,
  );
}

async function copy(text, what) {
  await copyText(text);
  toast(`Copied as a ${what}`);
}
