// Talking to the server: the key, errors as the API tells them, and answers as they stream.

import { EventParser } from "./sse.js";

const KEY = "mimo.key";
// More, with its name before it, no server reads.
const MAX_KEY_CHARS = 4000;
let keyInMemory = "";
let isRefused = false;
let maxFileBytes = Infinity;

/** An error of the API, or of the way there. `code` is the API's own word, `hint` what one can do. */
export class ApiError extends Error {
  constructor({ status, code, message, param = null, retryAfter = null, requestId = null }) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter, requestId });
    this.hint = hintFor(this);
  }

  /** The same, with files by their own names. `names` has them by their place in the request: messages[0].content[1]. */
  naming(names) {
    const named = (text) => text?.replace(/messages\[\d+\]\.content\[\d+\](\.\w+)*/g, (place) => {
      const known = names.get(/^messages\[\d+\]\.content\[\d+\]/.exec(place)[0]);
      return known === undefined ? place : `"${known}"`;
    });
    this.message = named(this.message);
    this.isOfFile = this.param !== null && named(this.param) !== this.param;
    this.hint = hintFor(this);
    return this;
  }
}

/** What no header can carry, in words; null for a key that can be sent. */
export function faultOfKey(key) {
  const odd = [...key].find((char) => char < "!" || char > "~");
  if (odd !== undefined) return `A key has letters, digits and signs of ASCII alone; this one has ${odd.trim() ? `"${odd}"` : "a space"} in it.`;
  return key.length > MAX_KEY_CHARS ? `That is too long for a key: ${key.length} characters.` : null;
}

/** Kept until the tab is closed, or only until the page is left where storage is forbidden. */
export function apiKey() {
  if (keyInMemory) return keyInMemory;
  try {
    const kept = sessionStorage.getItem(KEY) ?? "";
    return faultOfKey(kept) === null ? kept : "";
  } catch {
    return "";
  }
}

/** Used from now on; kept once the server has taken it. "" forgets. */
export function setApiKey(key) {
  keyInMemory = key;
  isRefused = false;
  keep("");
}

/** Whether the server did not take the last key. */
export const wasKeyRefused = () => isRefused;

/** The largest file that the server takes, as far as it has said. */
export const largestFile = () => maxFileBytes;

function keep(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // In memory it is.
  }
}

/** What is not of the API, such as this page, is given to any key. */
function heard(path, key, status) {
  if (!path.startsWith("/v1/") || !key || key !== apiKey()) return;
  if (status === 401) {
    setApiKey("");
    isRefused = true;
  } else if (status < 300) {
    isRefused = false;
    keep(key);
  }
}

export async function getJson(path, options = {}) {
  const response = await call(path, options);
  return response.json();
}

/**
 * Streams one chat completion. `onEvent` gets every chunk; resolves when the answer is whole. Rejects with ApiError, or with an AbortError when `signal` says so.
 */
export async function streamChat(body, { signal, onEvent }) {
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const requestId = response.headers.get("X-Request-Id");
  const parser = new EventParser();
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await broken(reader.read(), requestId);
    for (const data of done ? parser.close() : parser.push(value)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw fromBody(response.status, event, response.headers);
      onEvent(event);
    }
    if (done) {
      throw new ApiError({ status: 0, code: "stream_cut", message: "The answer ended before its end.", requestId });
    }
  }
}

/** Leaves a file with the server until `deleteFile` or its time is up; resolves to its id. */
export async function uploadFile(file, signal) {
  const form = new FormData();
  form.set("purpose", "user_data");
  form.set("file", file, file.name);
  const response = await call("/v1/files", { method: "POST", body: form, signal });
  return (await response.json()).id;
}

/** The server forgets it some day in any case, so a failure is none of the person's business. */
export async function deleteFile(id) {
  await call(`/v1/files/${id}`, { method: "DELETE", keepalive: true }).catch(() => {});
}

async function call(path, options) {
  const headers = new Headers(options.headers);
  const key = apiKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await broken(fetch(path, { cache: "no-store", ...options, headers }));
  heard(path, key, response.status);
  if (response.ok) return response;
  let body = {};
  try {
    body = await response.json();
  } catch {
    // Not from the API itself: a proxy's page.
  }
  throw fromBody(response.status, body, response.headers);
}

/** A fault of the network as an ApiError. */
async function broken(promise, requestId = null) {
  try {
    return await promise;
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ApiError({ status: 0, code: "unreachable", message: "The server does not answer.", requestId });
  }
}

function fromBody(status, body, headers) {
  const error = body?.error ?? {};
  const limit = /(\d+) bytes \(gateway\.file_max_bytes\)/.exec(error.message ?? "");
  if (limit) maxFileBytes = Number(limit[1]);
  return new ApiError({
    status: error.status ?? status,
    code: error.code ?? `http_${status}`,
    message: error.message ?? `The server answered with status ${status}.`,
    param: error.param ?? null,
    retryAfter: headers.get("Retry-After"),
    requestId: headers.get("X-Request-Id"),
  });
}

function hintFor({ status, code, param, retryAfter, message, isOfFile }) {
  if (status === 401) return "Try again asks for the key.";
  if (code === "unreachable") return "Is it still running? The page connects again by itself; then use Try again.";
  if (code === "stream_cut") return "The connection broke or the server stopped. What came is kept; Try again asks anew.";
  if (status === 413) {
    // Which limit it is, the server says itself.
    const setting = /\b(?:gateway|encoder|engine)\.[a-z_.]+\w/.exec(message)?.[0] ?? (/\bbody\b/.test(message) ? "gateway.max_body_bytes" : null);
    return `Attach something smaller${setting ? `, or let the administrator raise ${setting}` : ""}.`;
  }
  if (status === 415 || status === 422) return "The file is damaged or of a kind the server does not read. Remove it or take another.";
  if (status === 429 || status === 503) {
    return retryAfter ? `Too busy right now. Try again in ${retryAfter} s.` : "Too busy right now. Try again in a moment.";
  }
  if (status === 408 || status === 504) return "It took too long. Try again, or ask for a shorter answer.";
  if (code === "context_too_long" || code === "context_length_exceeded") return "Start a new chat, attach less, or ask for a shorter answer.";
  if (status === 400 && isOfFile) return "Remove the file or take another.";
  if (status === 400 && param) return `The field is ${param}. Settings may hold its value.`;
  if (status >= 500) return "A fault of the server; its log has the request id. Try again.";
  return "";
}
