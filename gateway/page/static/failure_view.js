/** A failure as the reader sees it: what, where, what to do, and a way to do it. */

import { apiKey } from "./api.js";
import { button, el } from "./dom.js";
import { advice } from "./failure.js";

/** The card. `retry` runs what failed once more. */
export function failureView(failure, retry) {
  const [title, remedy] = advice(failure);
  return el("section", { class: "failure", role: "alert" },
    el("h2", {}, title),
    el("p", {}, failure.message),
    el("p", { class: "muted" }, remedy),
    factsView(failure),
    failure.status === 401 ? keyView(retry) : retryView(failure, retry),
  );
}

function factsView({ param, code, status, requestId }) {
  const facts = [["Field", param], ["Code", code], ["Status", status || null], ["Request", requestId]];
  return el("dl", { class: "facts" }, facts.filter(([, value]) => value).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, el("code", {}, String(value))))));
}

function keyView(retry) {
  const field = el("input", {
    type: "password", autocomplete: "off", spellcheck: "false", "aria-label": "API key", placeholder: "API key", required: true,
  });
  const submit = (event) => {
    event.preventDefault();
    apiKey.set(field.value.trim());
    retry();
  };
  return el("form", { class: "key", submit }, field, el("button", { type: "submit", class: "primary" }, "Use key"));
}

function retryView({ retrySeconds }, retry) {
  const again = button("Try again", retry, { class: "quiet bordered retry" });
  if (retrySeconds) countDown(again, Math.ceil(retrySeconds));
  return again;
}

/** Keeps the button from being used before the server's wait is over. */
function countDown(again, seconds) {
  const show = () => {
    again.disabled = seconds > 0;
    again.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  };
  const timer = setInterval(() => {
    seconds -= 1;
    show();
    if (seconds <= 0) clearInterval(timer);
  }, 1000);
  show();
}
