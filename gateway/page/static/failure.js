/** What can go wrong with a request, and what the reader can do about it. */

export class Failure extends Error {
  /**
   * status: HTTP's, or 0 if there was no answer. param, code: as the API tells them, or null.
   * requestId: for the operator's log. retrySeconds: what the server asks to wait, or null.
   */
  constructor(message, { status = 0, param = null, code = null, requestId = "", retrySeconds = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, requestId, retrySeconds });
  }
}

/** The failure that a response with an error's status tells. */
export async function failureOf(response) {
  const told = await response.json().catch(() => null);
  const error = told?.error ?? {};
  const wait = Number.parseFloat(response.headers.get("retry-after") ?? "");
  return new Failure(error.message || `The server answered with status ${response.status}.`, {
    status: response.status,
    param: error.param ?? null,
    code: error.code ?? null,
    requestId: response.headers.get("x-request-id") ?? "",
    retrySeconds: Number.isFinite(wait) ? wait : null,
  });
}

const BY_CODE = {
  model_not_found: ["This model is not served here", "Choose another model above; the list is read anew."],
  context_length_exceeded: ["Too much for the model's context", "Start a new chat, send fewer pictures, or ask for fewer tokens in the settings."],
  too_many_images: ["Too many pictures", "Start a new chat, or send fewer pictures at once."],
  image_too_large: ["The picture is too large", "Send a smaller file."],
  body_too_large: ["The request is too large", "Send smaller pictures, or fewer of them."],
  image_parse_error: ["The picture cannot be read", "Save it as PNG or JPEG and add it again."],
  embedding_not_found: ["The held embedding is gone", "It has expired or the service was restarted. Compare again to make a new one."],
  answer_broke_off: ["The answer broke off", "What came so far is shown. Try again."],
  no_encoder: ["No encoder can be reached", "Wait until one is back, or ask the operator."],
};

const BY_STATUS = {
  0: ["The gateway does not answer", "Check that it runs and that this device is online."],
  401: ["An API key is needed", "Enter one that the operator gave you. It stays in this tab."],
  403: ["This key may not do that", "Use another key in the settings."],
  429: ["Too much at once", "The service is busy, or your key's limit is used up."],
  503: ["The model is not ready", "It may be starting or out of reach."],
};

/** A title for a failure, and what to do about it. */
export function advice({ status, code, param }) {
  if (status === undefined) return ["This page failed", "Reload it. If it stays so, tell the operator."];
  const known = BY_CODE[code] ?? BY_STATUS[status];
  if (known) return known;
  if (status >= 500) return ["The service failed", "Try again. If it stays so, give the operator the request id."];
  return ["The request was refused", param ? "Change what is named below and ask again." : "Change it and ask again."];
}
