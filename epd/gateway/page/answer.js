// One answer as it comes, and what is told below it. What the model says goes in as text, see markdown.js.

import { el } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { MarkdownView } from "./markdown.js";

/** One answer on its way into its place in the log. */
export class AnswerView {
  content = "";
  reasoning = "";
  calls = [];
  isWhole = false;

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

  /** `isWhole` unless it was stopped or broke off. */
  finish(isWhole) {
    this.isWhole = isWhole;
    cancelAnimationFrame(this.frame);
    this.draw();
    this.node.classList.remove("busy");
    this.node.removeAttribute("aria-busy");
    this.body.classList.remove("caret");
  }

  /** Calls that came with all their arguments; a cut answer may end in the middle of one. */
  get wholeCalls() {
    return this.isWhole ? this.calls.filter((call) => isJson(call.function.arguments)) : [];
  }

  /** What later requests say of it; null for no answer: an error, or stopped before its first word. */
  message() {
    const calls = this.wholeCalls;
    if (!this.content && !calls.length && (!this.isWhole || this.calls.length)) return null;
    const message = { role: "assistant", content: this.content || (calls.length || this.reasoning ? null : "") };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (calls.length) message.tool_calls = calls;
    return message;
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** A call of a tool; `form` takes its result. */
export function callNode(call, form = null) {
  const given = call.function.arguments;
  // Not whole yet: as it came.
  const shown = isJson(given) ? JSON.stringify(JSON.parse(given), null, 2) : given;
  return el("div.call", {}, el("p.name", {}, "Calls ", el("code", {}, call.function.name || "...")), el("pre", { tabindex: "0" }, shown), form);
}

/** What went wrong, its code, and what one can do. */
export function faultNode(error) {
  const status = error.status ? ` ${error.status}` : "";
  return el("div.fault", { role: "alert" },
    el("p", {}, el("strong", {}, "No answer. "), error.message, " ", el("code", {}, `${error.code}${status}`)),
    error.hint && el("p", {}, error.hint),
    error.requestId && el("p", {}, "Request ", el("code", {}, error.requestId)));
}

/** What an answer took, in words. */
export function factsOf(view, end, stopped) {
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
