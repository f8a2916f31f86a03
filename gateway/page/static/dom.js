/** Builds elements. Text is always a text node: nothing here reads HTML. */

/** The element with that id, which index.html has. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. `attributes` are set as they are named; a function is a listener of the event of
 * that name; true and false are an attribute without a value, and none.
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

/** A button that does `click`. */
export const button = (label, click, attributes = {}) =>
  el("button", { type: "button", class: "quiet", click, ...attributes }, label);

/** Tells assistive technology `text`, once. */
export function say(text) {
  byId("said").textContent = text;
}

let fading;

/** Shows `text` for a moment, and says it. */
export function toast(text) {
  say(text);
  const shown = byId("toast");
  shown.textContent = text;
  shown.classList.add("shown");
  clearTimeout(fading);
  fading = setTimeout(() => shown.classList.remove("shown"), 2200);
}
