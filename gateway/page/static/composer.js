/** Where a question is written and pictures are gathered. */

import { button, byId, el, say, toast } from "./dom.js";
import { forget, looksLikePicture, namedAsPasted, readPicture, thumbnail } from "./pictures.js";
import { bytes } from "./words.js";

export class Composer {
  /** `onAsk(draft)` and `onCompare(draft)` take { text, pictures }; `onChange` hears of any change. */
  constructor({ onAsk, onCompare, onChange }) {
    this.pictures = [];
    this.field = byId("question");
    this.list = byId("pictures");
    this.onChange = onChange;
    this.send = () => this.isEmpty || onAsk(this.draft);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("compare").addEventListener("click", () => this.isEmpty || onCompare(this.draft));
    this.field.addEventListener("keydown", (event) => this.onKey(event));
    this.field.addEventListener("input", () => this.changed());
    this.listenForFiles();
  }

  get draft() {
    return { text: this.field.value.trim(), pictures: [...this.pictures] };
  }

  get isEmpty() {
    return !this.field.value.trim() && !this.pictures.length;
  }

  /** Empties it: what it held is the conversation's now. */
  clear() {
    this.pictures = [];
    this.field.value = "";
    this.changed();
  }

  /** Takes the pictures among `files`, and says of others that they are none. */
  async add(files) {
    const wanted = files.filter(looksLikePicture);
    if (wanted.length < files.length) toast("Only picture files can be added");
    for (const file of wanted) {
      const picture = await readPicture(file).catch(() => null);
      if (picture) this.pictures.push(picture);
      else toast("A file could not be read");
    }
    this.changed();
    if (wanted.length) say(`${this.pictures.length} pictures to send.`);
    this.field.focus();
  }

  remove(picture) {
    this.pictures = this.pictures.filter((other) => other !== picture);
    forget(picture);
    this.changed();
    this.field.focus();
  }

  changed() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
    this.list.replaceChildren(...this.pictures.map((picture) => this.itemOf(picture)));
    this.list.hidden = !this.pictures.length;
    this.onChange();
  }

  itemOf(picture) {
    const label = `Remove ${picture.name}`;
    return el("li", {},
      thumbnail(picture, 44),
      el("div", {}, el("span", { class: "name" }, picture.name), el("span", { class: "muted" }, bytes(picture.size))),
      button("×", () => this.remove(picture), { class: "quiet remove", "aria-label": label, title: label }),
    );
  }

  onKey(event) {
    // Enter ends a word in many input methods, and must not send it.
    const writing = event.isComposing || event.keyCode === 229;
    if (event.key !== "Enter" || event.shiftKey || writing) return;
    event.preventDefault();
    this.send();
  }

  listenForFiles() {
    const files = byId("files");
    byId("choose").addEventListener("click", () => files.click());
    files.addEventListener("change", async () => {
      await this.add([...files.files]);
      files.value = "";
    });
    document.addEventListener("paste", (event) => {
      const pasted = [...(event.clipboardData?.files ?? [])].map(namedAsPasted);
      if (!pasted.length) return;
      event.preventDefault();
      this.add(pasted);
    });
    this.listenForDrops();
  }

  listenForDrops() {
    const show = (shown) => document.body.classList.toggle("dropping", shown);
    const withFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!withFiles(event)) return;
      event.preventDefault();
      show(true);
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget ?? show(false));
    document.addEventListener("drop", (event) => {
      show(false);
      if (!withFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }
}
