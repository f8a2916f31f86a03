/** Figures as people read them. */

const WHOLE = new Intl.NumberFormat("en");
const UNITS = ["bytes", "kB", "MB", "GB"];

/** 1234 -> "1,234". */
export const count = (number) => WHOLE.format(number);

/** 1, "token" -> "1 token"; 2 -> "2 tokens". */
export const counted = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Milliseconds: 0.01 -> "< 0.1 ms", 3.25 -> "3.3 ms", 1234 -> "1.23 s". */
export function duration(ms) {
  if (ms < 0.05) return "< 0.1 ms";
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms >= 10 ? Math.round(ms) : ms.toFixed(1)} ms`;
}

/** Bytes: 512 -> "512 bytes", 20480 -> "20 kB". */
export function bytes(size) {
  let unit = 0;
  for (; size >= 1000 && unit < UNITS.length - 1; unit += 1) size /= 1000;
  return `${size >= 10 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`;
}
