// Talking to the server: the key, errors as the API tells them, and answers as they stream.

import { EventParser } from "./sse.js";

const KEY = "mimo.key";
let keyInMemory = "";

/** An error of the API, or of the way there. `code` is the API's own word, `hint` what one can do. */
export class ApiError extends Error {
  constructor({ status, code, message, param = null, retryAfter = null, requestId = null }) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter, requestId });
    this.hint = hintFor(this);
  }
}

/** Kept until the tab is closed, or only until the page is left where storage is forbidden. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? keyInMemory;
  } catch {
    return keyInMemory;
  }
}

export function setApiKey(key) {
  keyInMemory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // In memory it is.
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
  return new ApiError({
    status: error.status ?? status,
    code: error.code ?? `http_${status}`,
    message: error.message ?? `The server answered with status ${status}.`,
    param: error.param ?? null,
    retryAfter: headers.get("Retry-After"),
    requestId: headers.get("X-Request-Id"),
  });
}

function hintFor({ status, code, param, retryAfter }) {
  if (status === 401) return "Try again asks for the key.";
  if (code === "unreachable") return "Is it still running? The page connects again by itself; then use Try again.";
  if (code === "stream_cut") return "The connection broke or the server stopped. What came is kept; Try again asks anew.";
  if (status === 413) return "Attach something smaller, or let the administrator raise gateway.max_body_bytes.";
  if (status === 415 || status === 422) return "The file is damaged or of a kind the server does not read. Remove it or take another.";
  if (status === 429 || status === 503) {
    return retryAfter ? `Too busy right now. Try again in ${retryAfter} s.` : "Too busy right now. Try again in a moment.";
  }
  if (status === 408 || status === 504) return "It took too long. Try again, or ask for a shorter answer.";
  if (code === "context_too_long" || code === "context_length_exceeded") return "Start a new chat, attach less, or ask for a shorter answer.";
  if (status === 400 && param) return `The field is ${param}. Settings may hold its value.`;
  if (status >= 500) return "A fault of the server; its log has the request id. Try again.";
  return "";
}
