/** Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html */

const LINE_END = /\r\n|\n|\r/;

/** A function that takes text as it comes, cut anywhere, and gives the data of what events it ends. */
export function eventParser() {
  let rest = "";
  let data = [];

  function line(text) {
    if (text === "") {
      const whole = data.length ? [data.join("\n")] : [];
      data = [];
      return whole;
    }
    if (text === "data") data.push("");
    else if (text.startsWith("data:")) data.push(text.slice(5).replace(/^ /, ""));
    return [];
  }

  return (text) => {
    rest += text;
    // A carriage return at the very end may be the first half of a line's end.
    const held = rest.endsWith("\r") ? "\r" : "";
    const lines = (held ? rest.slice(0, -1) : rest).split(LINE_END);
    rest = lines.pop() + held;
    return lines.flatMap(line);
  };
}

/** The data of each event of a body of bytes. */
export async function* eventsOf(body) {
  const take = eventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* take(value);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
