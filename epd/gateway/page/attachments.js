// Media on their way to a question: dropped, pasted, picked or recorded; shown with a button to take them back.

import { ApiError, deleteFile, largestFile, uploadFile } from "./api.js";
import { byId, el, svg } from "./dom.js";
import { bytes } from "./format.js";

const BY_ENDING = {
  image: ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ico", "heic", "heif", "ppm", "pgm"],
  video: ["mp4", "mov", "mkv", "webm", "avi", "ts", "flv", "m4v", "mpg", "mpeg"],
  audio: ["wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "aif", "aiff", "caf", "au", "oga"],
};
// As text in a message; longer ones are not meant for that.
const MAX_TEXT_BYTES = 1 << 20;
// Larger media are uploaded once; smaller ones travel within every question, and nothing of them stays behind.
const MAX_INLINE_BYTES = 4 << 20;

/** image, video, audio or text; null for what no message can hold. */
export function kindOf(file) {
  const family = file.type.split("/")[0];
  if (family === "text") return "text";
  if (family in BY_ENDING) return family;
  const ending = file.name.toLowerCase().split(".").pop();
  if (["txt", "md", "json", "csv"].includes(ending)) return "text";
  return Object.keys(BY_ENDING).find((kind) => BY_ENDING[kind].includes(ending)) ?? null;
}

/** One medium: its file, and a URL of it for this page. */
export class Medium {
  constructor(file, kind) {
    this.file = file;
    this.kind = kind;
    this.address = URL.createObjectURL(file);
    this.data = null;
    this.fileId = null;
    this.uploading = null;
    this.isReleased = false;
  }

  /** A node that shows it and names it; its name alone where the browser cannot show it. */
  view({ controls }) {
    const words = `${this.kind}: ${this.file.name}`;
    const node =
      this.kind === "image"
        ? el("img", { src: this.address, alt: words })
        : el(this.kind, { src: this.address, controls, preload: "metadata", "aria-label": words, muted: this.kind === "video" && !controls });
    node.addEventListener("error", () => node.replaceWith(el("span.file", { title: words }, this.file.name)), { once: true });
    // Sounds and videos have no role, so that nothing would read their names.
    return this.kind === "image" ? node : el("div.medium", { role: "group", "aria-label": words }, node);
  }

  /** Its part of a message. Read or uploaded once, whatever the length of the conversation. Rejects with ApiError. */
  async part(signal) {
    const type = `${this.kind}_url`;
    if (this.isLarge) {
      return { type, [type]: { file_id: await unlessAborted(this.upload(), signal) } };
    }
    this.data ??= await dataUrl(this.file);
    return { type, [type]: { url: this.data } };
  }

  /** Resolves to its id with the server. Rejects with ApiError. */
  async upload() {
    if (this.fileId) return this.fileId;
    this.uploading ??= this.#upload();
    return this.uploading;
  }

  get isLarge() {
    return this.file.size > MAX_INLINE_BYTES;
  }

  async #upload() {
    try {
      this.fileId = await uploadFile(this.file);
    } catch (error) {
      if (error instanceof ApiError && error.status) error.message = `"${this.file.name}": ${error.message}`;
      throw error;
    } finally {
      this.uploading = null;
    }
    if (this.isReleased) deleteFile(this.fileId);
    return this.fileId;
  }

  /** The server no longer has it: the next question brings it again. */
  forget() {
    this.fileId = null;
  }

  release() {
    URL.revokeObjectURL(this.address);
    this.isReleased = true;
    if (this.fileId) deleteFile(this.fileId);
  }
}

/** The upload goes on for the next question; who waits for it does not. */
function unlessAborted(promise, signal) {
  signal?.throwIfAborted();
  return new Promise((resolve, reject) => {
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
    promise.then(resolve, reject);
  });
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => {
      // The type is the browser's guess and may be empty; the server looks at the bytes alone.
      const comma = reader.result.indexOf(",");
      resolve(`data:${file.type.split(";")[0] || "application/octet-stream"};base64,${reader.result.slice(comma + 1)}`);
    };
    reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });
}

export class Attachments {
  #media = [];
  #list = byId("attachments");
  /** What the model takes; null until the server has said it. */
  #taken = null;

  /** `say` shows a line to the person, `insert` puts text into the question. */
  constructor({ say, insert }) {
    this.say = say;
    this.insert = insert;
    this.#listen();
  }

  get isEmpty() {
    return this.#media.length === 0;
  }

  /** `kinds` are image, video and audio, or fewer; none for a model of text alone. */
  setTaken(kinds) {
    this.#taken = kinds;
    for (const id of ["attach", "microphone"]) byId(id).hidden = !kinds.length;
    if (!kinds.includes("audio")) byId("microphone").hidden = true;
  }

  async add(files) {
    const refused = [];
    const empty = [];
    const large = [];
    const untaken = new Set();
    for (const file of files) {
      const kind = kindOf(file);
      if (kind === null || (kind === "text" && file.size > MAX_TEXT_BYTES)) refused.push(file.name);
      else if (file.size === 0) empty.push(file.name);
      else if (kind === "text") this.insert(await file.text());
      else if (this.#taken !== null && !this.#taken.includes(kind)) untaken.add(kind);
      else if (file.size > largestFile()) large.push(file.name);
      else this.#bring(new Medium(file, kind));
    }
    const faults = [...untaken].map((kind) => `This model takes no ${kind}.`);
    if (refused.length) faults.push(`Not attached, since it is no picture, video or sound: ${refused.join(", ")}`);
    if (empty.length) faults.push(`Not attached, since there is nothing in it: ${empty.join(", ")}`);
    if (large.length) faults.push(`Not attached, since this server takes ${bytes(largestFile())} at most (gateway.file_max_bytes): ${large.join(", ")}`);
    this.say(faults.join(" "));
  }

  /** Large ones go to the server at once: whether it takes them is known before anything is asked about them. */
  async #bring(medium) {
    this.put(medium);
    if (!medium.isLarge) return;
    try {
      await medium.upload();
    } catch (error) {
      // Of other faults the question tells, which tries again.
      if (!(error instanceof ApiError) || ![400, 413, 415, 422].includes(error.status)) return;
      const index = this.#media.indexOf(medium);
      if (index < 0) return;
      this.#media.splice(index, 1);
      medium.release();
      this.#show();
      this.say(`Not attached. ${error.message} ${error.hint}`);
    }
  }

  put(medium) {
    this.#media.push(medium);
    this.#show();
  }

  /** Gives them away, to a message. */
  take() {
    const taken = this.#media;
    this.#media = [];
    this.#show();
    return taken;
  }

  discard() {
    for (const medium of this.take()) medium.release();
  }

  #show() {
    this.#list.replaceChildren(
      ...this.#media.map((medium, index) =>
        el("li", { data: { kind: medium.kind } },
          medium.view({ controls: medium.kind === "audio" }),
          el("button.remove", { type: "button", "aria-label": `Remove ${medium.file.name}`, onclick: () => this.#remove(index) }, "×"),
        ),
      ),
    );
  }

  #remove(index) {
    const [medium] = this.#media.splice(index, 1);
    medium.release();
    this.#show();
    const left = this.#list.querySelectorAll(".remove");
    (left[Math.min(index, left.length - 1)] ?? byId("question")).focus();
  }

  #listen() {
    const zone = byId("dropzone");
    const input = byId("files");
    let depth = 0;
    const shown = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragenter", (event) => {
      if (!shown(event)) return;
      event.preventDefault();
      depth += 1;
      zone.hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (!shown(event)) return;
      depth = Math.max(0, depth - 1);
      zone.hidden = depth === 0;
    });
    addEventListener("dragover", (event) => shown(event) && event.preventDefault());
    addEventListener("drop", (event) => {
      if (!shown(event)) return;
      event.preventDefault();
      depth = 0;
      zone.hidden = true;
      this.add([...event.dataTransfer.files]);
      byId("question").focus();
    });
    addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length || event.target.closest?.("dialog")) return;
      event.preventDefault();
      this.add(files);
    });
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
      byId("question").focus();
    });
  }
}

/** A sound as a row of bars, where there is no picture of it. */
export function waveform() {
  const heights = [6, 10, 18, 30, 22, 38, 48, 34, 44, 26, 36, 50, 40, 28, 42, 32, 20, 30, 24, 14, 20, 10, 6];
  const bars = heights.map((height, index) => svg("rect", { class: "wave", x: index * 8 + 1, y: (56 - height) / 2, width: 4, height, rx: 2 }));
  return svg("svg", { viewBox: "0 0 184 56", "aria-hidden": "true" }, ...bars);
}
