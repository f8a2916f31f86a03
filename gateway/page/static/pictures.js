/** Picture files of the reader's. */

import { el } from "./dom.js";

// Control characters and those that turn the direction of text make a name look like another.
const DECEIVING = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const LONGEST_NAME = 120;
let pasted = 0;

/** Whether to take a file. What it truly holds the gateway finds out. */
export const looksLikePicture = (file) => file.type.startsWith("image/") || /\.(heic|heif|avif|tiff?)$/i.test(file.name);

/** A file as a picture: name, type, size in bytes, `url` (all of it) and `thumbnail` (for this tab). */
export async function readPicture(file) {
  const type = /^image\/[\w.+-]+$/.test(file.type) ? file.type : "image/png";
  return Object.freeze({
    name: cleanName(file.name),
    type,
    size: file.size,
    url: await dataUrl(file, type),
    thumbnail: URL.createObjectURL(file),
  });
}

/** Frees what the thumbnail holds. */
export const forget = (picture) => URL.revokeObjectURL(picture.thumbnail);

/** A file of the clipboard under a name of its own: browsers call each of them image.png. */
export function namedAsPasted(file) {
  if (file.name !== "image.png") return file;
  pasted += 1;
  return new File([file], `pasted-${pasted}.png`, { type: file.type });
}

/** A small drawing, for readers with no picture at hand. */
export async function drawnPicture() {
  const canvas = el("canvas", { width: 224, height: 224 });
  const brush = canvas.getContext("2d");
  brush.fillStyle = "#f4f4f0";
  brush.fillRect(0, 0, 224, 224);
  brush.fillStyle = "#d22f2f";
  brush.beginPath();
  brush.moveTo(112, 62);
  brush.lineTo(166, 156);
  brush.lineTo(58, 156);
  brush.fill();
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], "drawn.png", { type: "image/png" });
}

/** The picture, or its kind where the browser cannot show it. `alt` is empty beside its name. */
export function thumbnail(picture, size, alt = "") {
  const image = el("img", { src: picture.thumbnail, alt, width: size, height: size, class: "thumb" });
  image.addEventListener("error", () => {
    const kind = picture.name.includes(".") ? picture.name.split(".").pop() : "file";
    image.replaceWith(el("span", { class: "thumb kind", role: "img", "aria-label": alt || kind }, kind.slice(0, 4)));
  });
  return image;
}

function cleanName(name) {
  const clean = name.replace(DECEIVING, "_") || "picture";
  return clean.length > LONGEST_NAME ? clean.slice(-LONGEST_NAME) : clean;
}

async function dataUrl(file, type) {
  const reader = new FileReader();
  await new Promise((resolve, reject) => {
    reader.onload = resolve;
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  const base64 = reader.result.slice(reader.result.indexOf(",") + 1);
  return `data:${type};base64,${base64}`;
}
