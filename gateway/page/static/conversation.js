/** What is asked, as plain values, and the JSON that asks it. */

/** A picture as it is. */
export const rawPart = (picture) => ({ type: "image_url", image_url: { url: picture.url } });

/** The picture's held embedding. */
export const referencePart = (ref) => ({ type: "image_embeds", image_embeds: { ref } });

/**
 * A question with all that goes before it.
 * history: [{ text, pictures, answer }], oldest first. settings: { model, system, temperature, maxTokens }.
 */
export const questionOf = (text, pictures, history, settings) =>
  Object.freeze({ text, pictures, history, ...settings });

/** The body of the request. `partOf` gives a picture's part of the content. */
export function bodyOf(question, partOf = rawPart) {
  return {
    model: question.model,
    messages: messagesOf(question, partOf),
    temperature: question.temperature,
    ...(question.maxTokens ? { max_tokens: question.maxTokens } : {}),
  };
}

/** All pictures of the conversation, in order, with the places that the answer's trace tells. */
export function placedPictures(question) {
  const first = question.system ? 1 : 0;
  return [...question.history, question].flatMap((turn, number) =>
    turn.pictures.map((picture, part) => ({ picture, message: first + 2 * number, part })),
  );
}

function messagesOf(question, partOf) {
  const system = question.system ? [{ role: "system", content: question.system }] : [];
  const earlier = question.history.flatMap((turn) => [
    { role: "user", content: contentOf(turn, partOf) },
    { role: "assistant", content: turn.answer },
  ]);
  return [...system, ...earlier, { role: "user", content: contentOf(question, partOf) }];
}

function contentOf({ text, pictures }, partOf) {
  if (!pictures.length) return text;
  const said = text ? [{ type: "text", text }] : [];
  return [...pictures.map(partOf), ...said];
}
