/** A question as a command or a program. Pictures are named as files; nothing of the key is copied. */

import { apiKey, baseUrl } from "./api.js";
import { bodyOf, placedPictures } from "./conversation.js";

const INDENT = 2;

/** A curl command for a POSIX shell. Run where the pictures are, it prints the answer as JSON. */
export function asCurl(question) {
  const marks = new Marks(question);
  const json = escapeForHereDocument(JSON.stringify(bodyOf(question, marks.part), null, INDENT));
  const body = marks.replace(json, ({ name, type }) => `data:${type};base64,$(base64 < ${shellQuoted(name)} | tr -d '\\n')`);
  const key = apiKey.get() ? ` \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"` : "";
  return `curl -sS ${shellQuoted(`${baseUrl()}/chat/completions`)} \\
  -H 'Content-Type: application/json'${key} \\
  -d @- <<END
${body}
END
`;
}

/** A Python program for the openai client. Run where the pictures are, it prints the answer. */
export function asPython(question) {
  const marks = new Marks(question);
  const { messages, ...options } = bodyOf(question, marks.part);
  const told = marks.replace(literal(messages, "    "), ({ name, type }) => `picture(${JSON.stringify(name)}, "${type}")`, '"');
  const more = Object.entries(options).map(([name, value]) => `    ${name}=${literal(value)},\n`);
  const key = apiKey.get() ? 'os.environ["OPENAI_API_KEY"]' : '"none"';
  return `${marks.any ? "import base64\n" : ""}${apiKey.get() ? "import os\n" : ""}${marks.any ? "from pathlib import Path\n" : ""}
from openai import OpenAI

${marks.any ? PICTURE : ""}client = OpenAI(base_url=${JSON.stringify(baseUrl())}, api_key=${key})
answer = client.chat.completions.create(
${more.join("")}    messages=${told},
)
print(answer.choices[0].message.content)
`.trimStart();
}

const PICTURE = `
def picture(path, kind):
    return f"data:{kind};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


`;

/** Puts the text on the clipboard, also where the page did not come over TLS. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text);
  }
}

/** Stand-ins for pictures that no text of the reader's can hold. */
class Marks {
  constructor(question) {
    const secret = [...crypto.getRandomValues(new Uint32Array(4))].map((word) => word.toString(36)).join("");
    this.pictures = placedPictures(question).map(({ picture }) => picture);
    this.name = `picture-${secret}-`;
    this.part = (picture) => ({ type: "image_url", image_url: { url: `${this.name}${this.pictures.indexOf(picture)}-` } });
  }

  get any() {
    return this.pictures.length > 0;
  }

  replace(text, written, quote = "") {
    const mark = new RegExp(`${quote}${this.name}(\\d+)-${quote}`, "g");
    return text.replace(mark, (_, number) => written(this.pictures[Number(number)]));
  }
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const escapeForHereDocument = (text) => text.replace(/[\\$`]/g, "\\$&");

/** JSON's strings and numbers are Python's too. */
function literal(value, indent = "") {
  const inner = `${indent}    `;
  const lines = (items, open, close) => `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
  if (Array.isArray(value)) return lines(value.map((item) => literal(item, inner)), "[", "]");
  if (value !== null && typeof value === "object") {
    return lines(Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, inner)}`), "{", "}");
  }
  return { true: "True", false: "False", null: "None" }[value] ?? JSON.stringify(value);
}

function copyBySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "hidden";
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}
