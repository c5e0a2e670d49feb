// The conversation: turns, questions, answers as they come. What the model says goes in as text, see markdown.js.

import { ApiError, streamChat } from "./api.js";
import { button, byId, el } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { MarkdownView } from "./markdown.js";
import { requestFields, systemPrompt } from "./settings.js";

/** One answer on its way into its place in the log. */
class AnswerView {
  content = "";
  reasoning = "";
  calls = [];

  constructor() {
    this.reasoningText = el("p");
    this.reasoningTitle = el("summary", {}, "Thinking");
    this.reasoningNode = el("details.reasoning", { hidden: true }, this.reasoningTitle, this.reasoningText);
    this.body = el("div.body");
    this.markdown = new MarkdownView(this.body);
    this.callNodes = el("div");
    this.after = el("div");
    this.facts = el("div.facts");
    this.node = el("article.turn.assistant.busy", { "aria-label": "Answer", "aria-busy": "true" },
      el("div.who", {}, "MiMo"), this.reasoningNode, this.body, this.callNodes, this.after, this.facts);
    this.body.classList.add("caret");
    this.startedAt = performance.now();
    this.frame = 0;
  }

  take(delta) {
    this.firstAt ??= performance.now();
    if (delta.reasoning_content) {
      this.reasoning += delta.reasoning_content;
    }
    if (delta.content) {
      if (this.reasoning && !this.content) this.thoughtFor = performance.now() - this.startedAt;
      this.content += delta.content;
    }
    for (const call of delta.tool_calls ?? []) {
      const known = (this.calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      if (call.id) known.id = call.id;
      known.function.name += call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
    }
    // Tokens may come faster than screens are drawn.
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    this.markdown.show(this.content);
    if (this.reasoning) {
      this.reasoningNode.hidden = false;
      this.reasoningText.textContent = this.reasoning;
      this.reasoningTitle.textContent = this.thoughtFor ? `Thought for ${duration(this.thoughtFor / 1000)}` : "Thinking";
    }
    this.callNodes.replaceChildren(...this.calls.map((call) => callNode(call)));
    this.onDraw?.();
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.node.classList.remove("busy");
    this.node.removeAttribute("aria-busy");
    this.body.classList.remove("caret");
  }

  message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) message.tool_calls = this.calls;
    if (message.content === null && !this.calls.length && !this.reasoning) message.content = "";
    return message;
  }
}

function callNode(call, form = null) {
  let shown = call.function.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // Not whole yet: as it came.
  }
  return el("div.call", {}, el("p.name", {}, "Calls ", el("code", {}, call.function.name || "...")), el("pre", { tabindex: "0" }, shown), form);
}

function faultNode(error) {
  const status = error.status ? ` ${error.status}` : "";
  return el("div.fault", { role: "alert" },
    el("p", {}, el("strong", {}, "No answer. "), error.message, " ", el("code", {}, `${error.code}${status}`)),
    error.hint && el("p", {}, error.hint),
    error.requestId && el("p", {}, "Request ", el("code", {}, error.requestId)));
}

export class Chat {
  /** Turns in order: {role, text, media, node} of the person, {role, view, node} of the model, {role, id, text} of tools. */
  #turns = [];
  #running = null;
  #log = byId("log");
  #said = byId("said");

  /** `needKey` asks for an API key and resolves to whether there is one; `onEnd` hears that a request has ended,
   *  `showTiming` shows where the time of one went. */
  constructor({ attachments, say, needKey, onEnd, showTiming, welcome, model }) {
    Object.assign(this, { attachments, say, needKey, onEnd, showTiming, welcome, model });
    this.clear();
  }

  get isRunning() {
    return this.#running !== null;
  }

  clear() {
    this.stop();
    for (const turn of this.#turns) for (const medium of turn.media ?? []) medium.release();
    this.#turns = [];
    this.#log.replaceChildren(this.welcome());
    byId("question").focus({ preventScroll: true });
  }

  stop() {
    this.#running?.abort();
  }

  /** Asks what stands in the composer. */
  async send() {
    const question = byId("question");
    const text = question.value.trim();
    if (this.isRunning || (!text && this.attachments.isEmpty)) return;
    question.value = "";
    grow(question);
    await this.ask(text, this.attachments.take());
  }

  async ask(text, media) {
    if (!this.#turns.length) this.#log.replaceChildren();
    const turn = { role: "user", text, media };
    turn.node = this.#userNode(turn);
    this.#turns.push(turn);
    this.#log.append(turn.node);
    await this.#answer();
  }

  #userNode(turn) {
    return el("article.turn.user", { "aria-label": "You" }, el("div.who", {}, "You"),
      turn.media.length ? el("div.media", {}, ...turn.media.map((medium) => medium.view({ controls: true }))) : null,
      turn.text ? el("div.text", {}, turn.text) : null,
      el("div.facts", {}, button("Edit", () => this.#edit(turn), { "aria-label": "Edit this question" })));
  }

  /** Takes a question and all that follows back into the composer. */
  #edit(turn) {
    this.stop();
    this.attachments.discard();
    this.#cut(this.#turns.indexOf(turn));
    for (const medium of turn.media) this.attachments.put(medium);
    const question = byId("question");
    question.value = turn.text;
    grow(question);
    question.focus();
    if (!this.#turns.length) this.#log.replaceChildren(this.welcome());
  }

  #cut(index) {
    for (const turn of this.#turns.splice(index)) turn.node.remove();
  }

  async #again(turn) {
    if (this.isRunning) return;
    this.#cut(this.#turns.indexOf(turn));
    await this.#answer();
  }

  /** The messages, and the names of files by their place in them. */
  async #messages(signal) {
    const names = new Map();
    const messages = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
    for (const turn of this.#turns) {
      if (turn.role === "assistant") {
        if (turn.view.content || turn.view.calls.length || turn.view.reasoning) messages.push(turn.view.message());
      } else if (turn.role === "tool") {
        messages.push({ role: "tool", tool_call_id: turn.id, content: turn.text });
      } else if (turn.media.length) {
        turn.media.forEach((medium, index) => names.set(`messages[${messages.length}].content[${index}]`, medium.file.name));
        const parts = await Promise.all(turn.media.map((medium) => medium.part(signal)));
        if (turn.text) parts.push({ type: "text", text: turn.text });
        messages.push({ role: "user", content: parts });
      } else {
        messages.push({ role: "user", content: turn.text });
      }
    }
    return { messages, names };
  }

  async #answer() {
    const view = new AnswerView();
    const turn = { role: "assistant", view, node: view.node };
    this.#turns.push(turn);
    this.#log.append(view.node);
    const speech = new Speech(this.#said);
    view.onDraw = () => {
      this.#followEnd();
      speech.say(view.content);
    };
    this.#followEnd(true);
    const running = new AbortController();
    this.#running = running;
    this.#showRunning();
    this.say("");
    const end = { usage: null, reason: null, warnings: [] };
    let fault = null;
    try {
      await this.#withKey(() => this.#stream(running.signal, view, end));
    } catch (error) {
      fault = error;
    }
    view.finish();
    if (this.#running === running) this.#running = null;
    this.#showRunning();
    if (!this.#turns.includes(turn)) return;
    this.#conclude(turn, end, fault);
    speech.end(fault === null ? view.content : "");
    this.#followEnd();
  }

  async #stream(signal, view, end) {
    const { messages, names } = await this.#messages(signal);
    const body = { model: this.model(), messages, stream: true, stream_options: { include_usage: true }, ...requestFields() };
    const onEvent = (event) => {
      end.answerId ??= event.id;
      const [choice] = event.choices ?? [];
      if (choice?.delta) view.take(choice.delta);
      if (choice?.finish_reason) end.reason = choice.finish_reason;
      if (event.usage) end.usage = event.usage;
      if (event.warnings) end.warnings = event.warnings;
    };
    try {
      await streamChat(body, { signal, onEvent });
    } catch (error) {
      throw error instanceof ApiError ? error.naming(names) : error;
    }
  }

  /** Asks for a key where the server wants one, until it has one or the person none. */
  async #withKey(attempt) {
    for (;;) {
      try {
        return await attempt();
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 401 || !(await this.needKey(error.message))) throw error;
      }
    }
  }

  /** The last lines of an answer: what went wrong, what it took, what one can do with it. */
  #conclude(turn, end, fault) {
    const { view } = turn;
    const stopped = fault?.name === "AbortError";
    if (fault && !stopped) view.after.append(faultNode(fault instanceof ApiError ? fault : new ApiError({ status: 0, code: fault.name, message: fault.message })));
    if (fault?.status === 404) for (const { media } of this.#turns) for (const medium of media ?? []) medium.forget();
    if (end.warnings.length) view.after.append(el("p.notice.calm", {}, end.warnings.join(" ")));
    if (view.calls.length && !fault) this.#offerResults(turn);
    this.onEnd();
    const facts = factsOf(view, end, stopped);
    view.facts.append(
      ...(view.content ? [button("Copy", (event) => this.#copy(view.content, event.currentTarget), { "aria-label": "Copy this answer" })] : []),
      ...(end.answerId ? [button("Timing", () => this.showTiming(end.answerId), { "aria-label": "Where the time of this answer went" })] : []),
      button("Try again", () => this.#again(turn), { "aria-label": "Answer this question again" }),
      ...facts.map((fact) => el("span", {}, fact)));
    if (stopped) this.#said.textContent = "Stopped.";
  }

  /** Each call waits for what the function gave; with the last result the model goes on. */
  #offerResults(turn) {
    const results = new Map();
    const nodes = turn.view.calls.map((call) => {
      const input = el("input", { "aria-label": `Result of ${call.function.name}`, placeholder: "What the function gave" });
      const give = button("Give result", null, { type: "submit" });
      const form = el("form", { onsubmit: async (event) => {
        event.preventDefault();
        if (this.isRunning || this.#turns.at(-1) !== turn) return;
        results.set(call.id, input.value);
        input.disabled = give.disabled = true;
        if (results.size < turn.view.calls.length) return;
        for (const [id, text] of results) this.#turns.push({ role: "tool", id, text, node: el("span") });
        await this.#answer();
      } }, input, give);
      return callNode(call, form);
    });
    turn.view.callNodes.replaceChildren(...nodes);
  }

  async #copy(text, node) {
    try {
      await navigator.clipboard.writeText(text);
      node.textContent = "Copied";
    } catch {
      node.textContent = "Not allowed here";
    }
    setTimeout(() => (node.textContent = "Copy"), 1500);
  }

  #showRunning() {
    byId("stop").hidden = !this.isRunning;
    byId("send").hidden = this.isRunning;
  }

  /** Keeps the end in sight for who is there; who reads further up is left alone. */
  #followEnd(always = false) {
    // On a narrow screen the whole page scrolls, and the composer covers its lower end.
    const isWhole = getComputedStyle(this.#log).overflowY === "visible";
    const end = this.#turns.at(-1)?.node.getBoundingClientRect().bottom ?? 0;
    const edge = isWhole ? byId("composer").getBoundingClientRect().top : this.#log.getBoundingClientRect().bottom;
    const below = end + 12 - edge;
    if (below > 0 && (always || below < 160)) (isWhole ? window : this.#log).scrollBy(0, below);
  }
}

function factsOf(view, end, stopped) {
  const facts = [];
  if (stopped) facts.push("stopped");
  if (end.reason === "length") facts.push("cut at the longest answer allowed");
  if (view.firstAt) facts.push(`first word after ${duration((view.firstAt - view.startedAt) / 1000)}`);
  if (end.usage) {
    const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = end.usage;
    facts.push(`${plural(prompt, "token")} in${details?.cached_tokens ? `, ${count(details.cached_tokens)} from cache` : ""}`);
    facts.push(`${count(completion)} out`);
  }
  return facts;
}

/** Reads a growing answer to a screen reader, sentence by sentence instead of token by token. */
class Speech {
  #spoken = 0;

  constructor(region) {
    this.region = region;
    region.textContent = "Answering.";
  }

  say(text) {
    const fresh = text.slice(this.#spoken);
    const end = fresh.search(/[.!?:]\s[^]*$|\n[^]*$/) < 0 ? -1 : Math.max(...[...fresh.matchAll(/[.!?:](?=\s)|\n/g)].map((match) => match.index + 1));
    if (end > 0) {
      this.region.textContent = fresh.slice(0, end);
      this.#spoken += end;
    }
  }

  end(text) {
    const rest = text.slice(this.#spoken);
    if (rest.trim()) this.region.textContent = rest;
  }
}

/** The question's box takes the height of its text, where the browser does not see to it. */
export function grow(question) {
  if (CSS.supports("field-sizing", "content")) return;
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}
