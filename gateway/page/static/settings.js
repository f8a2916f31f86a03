/** The drawer of settings, and the list of models. */

import { apiKey, listModels } from "./api.js";
import { byId, el } from "./dom.js";
import { count } from "./words.js";

/** What the drawer says now: { model, system, temperature, maxTokens }. */
export const settingsNow = () => ({
  model: byId("model").value,
  system: byId("system").value.trim(),
  temperature: byId("temperature").valueAsNumber,
  maxTokens: Math.max(0, Math.floor(byId("max-tokens").valueAsNumber || 0)),
});

/** Makes the drawer work. `onKey` hears of a changed key. */
export function listenToSettings(onKey) {
  const drawer = byId("settings");
  const key = byId("key");
  byId("open-settings").addEventListener("click", () => {
    key.value = apiKey.get();
    drawer.showModal();
  });
  // A click on the dialog itself is one beside its content.
  drawer.addEventListener("click", (event) => event.target === drawer && drawer.close());
  drawer.addEventListener("close", () => {
    if (key.value.trim() === apiKey.get()) return;
    apiKey.set(key.value.trim());
    onKey();
  });
  byId("temperature").addEventListener("input", ({ target }) => {
    byId("temperature-shown").textContent = target.value;
  });
  byId("model").addEventListener("change", showFacts);
}

let models = [];

/** Reads the models anew and keeps the one that was chosen, where it is still served. */
export async function loadModels() {
  models = await listModels();
  const choice = byId("model");
  const before = choice.value;
  choice.replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
  if (models.some(({ id }) => id === before)) choice.value = before;
  choice.disabled = models.length === 0;
  showFacts();
}

function showFacts() {
  const told = models.find(({ id }) => id === byId("model").value)?.chiasm;
  byId("facts").replaceChildren(...(told ? factsOf(told).map((fact) => el("span", {}, fact)) : []));
}

function factsOf(told) {
  const pictures = told.images ? `up to ${count(told.max_images)} pictures` : "no raw pictures";
  return [told.title, `${count(told.context_length)} tokens of context, ${pictures}`];
}
