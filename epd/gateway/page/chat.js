// The conversation: turns, questions and answers, and what of them the model hears again.

import { AnswerView, callNode, factsOf, faultNode } from "./answer.js";
import { ApiError, streamChat } from "./api.js";
import { button, byId, el } from "./dom.js";
import { requestFields, systemPrompt } from "./settings.js";

export class Chat {
  /** Turns in order: {role, text, media, node} of the person, {role, view, node} of the model, {role, id, text} of tools. Each has
   *  the `question` it belongs to; a question that was not answered `isLeftOut`, with all that belongs to it. */
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

  get isEmpty() {
    return this.#turns.length === 0;
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
    turn.question = turn;
    turn.note = el("span", { hidden: true }, "Not part of the conversation");
    turn.node = this.#userNode(turn);
    this.#turns.push(turn);
    this.#log.append(turn.node);
    await this.#answer();
  }

  #userNode(turn) {
    return el("article.turn.user", { "aria-label": "You" }, el("div.who", {}, "You"),
      turn.media.length ? el("div.media", {}, ...turn.media.map((medium) => medium.view({ controls: true }))) : null,
      turn.text ? el("div.text", {}, turn.text) : null,
      el("div.facts", {}, turn.note, button("Edit", () => this.#edit(turn), { "aria-label": "Edit this question" })));
  }

  /** Takes a question and all that follows back into the composer; from one that is left out nothing follows. */
  #edit(question) {
    if (!question.isLeftOut) this.stop();
    this.attachments.discard();
    this.#remove(question.isLeftOut ? this.#exchange(question) : this.#turns.slice(this.#turns.indexOf(question)), question);
    for (const medium of question.media) this.attachments.put(medium);
    const box = byId("question");
    box.value = question.text;
    grow(box);
    box.focus();
    if (this.isEmpty) this.#log.replaceChildren(this.welcome());
  }

  /** A question and what belongs to it. */
  #exchange(question) {
    return this.#turns.filter((turn) => turn.question === question);
  }

  /** The media of `kept` are still wanted. */
  #remove(gone, kept = null) {
    this.#turns = this.#turns.filter((turn) => !gone.includes(turn));
    for (const turn of gone) {
      turn.node.remove();
      if (turn !== kept) for (const medium of turn.media ?? []) medium.release();
    }
  }

  async #again(turn) {
    if (this.isRunning) return;
    const { question } = turn;
    if (question.isLeftOut) {
      // The conversation may have gone on without it: it is asked at the end of that.
      const exchange = this.#exchange(question);
      const asked = exchange.slice(0, exchange.indexOf(turn));
      this.#remove(exchange.slice(asked.length));
      this.#turns = [...this.#turns.filter((other) => !asked.includes(other)), ...asked];
      this.#log.append(...asked.map(({ node }) => node).filter((node) => node.isConnected));
    } else {
      this.#remove(this.#turns.slice(this.#turns.indexOf(turn)));
    }
    await this.#answer();
  }

  /** A question without an answer would be refused again with every later one, or stand before the next as if both were one. */
  #leaveOut(question, isLeftOut) {
    question.isLeftOut = isLeftOut;
    question.note.hidden = !isLeftOut;
    for (const turn of this.#exchange(question)) turn.node.classList.toggle("left-out", isLeftOut);
  }

  /** The messages, and the names of files by their place in them. */
  async #messages(signal) {
    const names = new Map();
    const messages = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
    for (const turn of this.#turns.filter(({ question }) => !question.isLeftOut)) {
      if (turn.role === "assistant") {
        const message = turn.view.message();
        if (message) messages.push(message);
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
    const { question } = this.#turns.at(-1);
    const turn = { role: "assistant", question, view, node: view.node };
    this.#leaveOut(question, false);
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
    view.finish(fault === null);
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
    if (view.wholeCalls.length) this.#offerResults(turn);
    this.#leaveOut(turn.question, view.message() === null);
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
    const wanted = turn.view.wholeCalls;
    const nodes = turn.view.calls.map((call) => {
      if (!wanted.includes(call)) return callNode(call);
      const input = el("input", { "aria-label": `Result of ${call.function.name}`, placeholder: "What the function gave" });
      const give = button("Give result", null, { type: "submit" });
      const form = el("form", { onsubmit: async (event) => {
        event.preventDefault();
        if (this.isRunning || this.#turns.at(-1) !== turn) return;
        results.set(call.id, input.value);
        input.disabled = give.disabled = true;
        if (results.size < wanted.length) return;
        for (const [id, text] of results) this.#turns.push({ role: "tool", question: turn.question, id, text, node: el("span") });
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
