// The pipeline, live: asked for once a second while somebody looks, drawn from what it says.

import { ApiError, getJson } from "./api.js";
import { button, byId, el, placed, svg } from "./dom.js";
import { bytes, clock, count, duration, longer } from "./format.js";
import { isFailed, outcomeOf, tokenBar, waterfall } from "./waterfall.js";

const PERIOD_MS = 1000;
const SLOW_PERIOD_MS = 2500;
const TIMEOUT_MS = 5000;
const MAX_KEPT = 64;
// Seconds of the small curve in each stage.
const CURVE_POINTS = 60;
const NAMES = { gateway: "Gateway", encode: "Encode", prefill: "Prefill", decode: "Decode", worker: "Prefill + decode" };
const POOLS = { full: "full attention", window: "window", embeddings: "embeddings" };

export class PipelineView {
  #view = null;
  #before = null;
  #receipts = [];
  #chosen = null;
  #tabStop = null;
  #waitingKey = false;
  #timer = 0;
  #drawn = "";
  #curves = new Map();

  /** `onView` hears every answer; `needKey` asks for an API key. */
  constructor({ needKey, onView }) {
    this.needKey = needKey;
    this.onView = onView;
    byId("follow").addEventListener("click", () => this.choose(null));
    byId("recent").addEventListener("keydown", (event) => this.#moveFocus(event));
    byId("recent").addEventListener("focusin", (event) => this.#setTabStop(event.target));
    document.addEventListener("visibilitychange", () => this.#turn());
    addEventListener("online", () => this.#turn());
    this.#turn();
  }

  /** Asks at once: a request has just ended. */
  hurry() {
    this.early = true;
    this.#turn();
  }

  /** Shows one request until told otherwise; null follows the latest. */
  choose(sequence) {
    this.#chosen = sequence;
    this.#drawRequests();
  }

  /** Shows the request with that id; false when it is no longer kept. */
  chooseRequest(requestId) {
    const found = this.#receipts.findLast((receipt) => receipt.request_id === requestId);
    if (found) this.choose(found.sequence);
    return found !== undefined;
  }

  #turn() {
    clearTimeout(this.#timer);
    if (document.hidden) this.#pulse("paused", "paused");
    else if (!this.#waitingKey) this.#poll();
  }

  async #poll() {
    let period = PERIOD_MS;
    const after = this.#view?.sequence ?? 0;
    const turn = (this.turn = {});
    try {
      const view = await getJson(`/v1/pipeline?after=${after}`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (turn !== this.turn) return;
      if (view.sequence < after) this.#restarted();
      else this.#take(view);
    } catch (error) {
      if (turn !== this.turn) return;
      if (error instanceof ApiError && error.status === 401) {
        await this.#askKey(error);
        return;
      }
      this.#gone(error);
      period = SLOW_PERIOD_MS;
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#turn(), period);
  }

  async #askKey(error) {
    this.#pulse("gone", "needs an API key");
    this.#waitingKey = true;
    const given = await this.needKey(error.message);
    this.#waitingKey = false;
    if (given) this.#turn();
    else byId("pulse").append(button("Give a key", () => this.#turn()));
  }

  /** The gateway counts from one again: what it said before is of another life. */
  #restarted() {
    this.#view = this.#before = null;
    this.#receipts = [];
    this.#chosen = null;
  }

  #gone(error) {
    const refused = error instanceof ApiError && error.status > 0;
    this.#pulse("gone", refused ? `error ${error.status}; trying again` : "the server is gone; trying again");
    byId("stages").classList.add("stale");
    this.#before = null;
  }

  #pulse(state, words) {
    const pulse = byId("pulse");
    if (pulse.dataset.state === state && pulse.textContent === words) return;
    pulse.dataset.state = state;
    pulse.textContent = words;
    // Where the panes lie one below the other, this one is out of sight.
    byId("gone").textContent = state === "gone" ? `${words[0].toUpperCase()}${words.slice(1)}.` : "";
  }

  #take(view) {
    this.#before = this.#view;
    this.#view = view;
    const fresh = view.requests.length > 0;
    this.#receipts = [...this.#receipts, ...view.requests].slice(-MAX_KEPT);
    byId("stages").classList.remove("stale");
    byId("pipeline").classList.add("known");
    const words = { ready: "live", waiting: "starting", draining: "stopping" }[view.status];
    this.#pulse(view.status === "ready" ? "live" : "starting", words);
    byId("pulse").title = `The gateway has run for ${longer(view.uptime_s)}`;
    this.#drawStages();
    this.#drawMemory();
    if (fresh || !this.#drawn) this.#drawRequests();
    this.early = false;
    this.onView(view);
  }

  /** How fast a counter of a process grows, per second; null before there are two answers of the same life. */
  #rate(stage, process, counter) {
    const before = this.#before?.stages.find((other) => other.stage === stage)?.processes.find((other) => other.name === process.name);
    const seconds = this.#before ? this.#view.now_unix_s - this.#before.now_unix_s : 0;
    const grown = (process.counters[counter] ?? 0) - (before?.counters[counter] ?? 0);
    return before && seconds > 0.05 && grown >= 0 ? grown / seconds : null;
  }

  #drawStages() {
    const { stages } = this.#view;
    const nodes = stages.map((stage, index) => {
      const sum = (name) => stage.processes.reduce((total, process) => total + process[name], 0);
      const rate = (counter) => stage.processes.reduce((total, process) => total + (this.#rate(stage.stage, process, counter) ?? 0), 0);
      const facts = factsOf(stage, rate, sum, this.#view);
      const busy = sum("running") + sum("waiting") > 0 || facts.moving > 0;
      const down = stage.processes.some((process) => !process.ready);
      const name = ["section", "stage", busy && "busy", down && "down"].filter(Boolean).join(".");
      return el(name, { data: { stage: stage.stage }, "aria-label": NAMES[stage.stage] },
        el("h3", {}, NAMES[stage.stage]),
        el("p.big", {}, count(facts.big[0]), el("small", {}, facts.big[1])),
        el("dl", {}, ...facts.lines.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
        el("ul.processes", { "aria-label": "Processes" }, ...stage.processes.map(processNode)),
        this.#curve(stage.stage, facts.moving),
        index < stages.length - 1 ? wire(busy) : null,
      );
    });
    const box = byId("stages");
    box.dataset.count = stages.length;
    // Drawn anew only when something has changed: a screen reader's place and a hovering mouse stay where they are.
    const drawn = nodes.map((node) => node.outerHTML).join("|");
    if (drawn === this.stagesDrawn) return;
    this.stagesDrawn = drawn;
    box.replaceChildren(...nodes);
  }

  /** What the stage has done over the last minute, as a line. */
  #curve(stage, value) {
    const values = [...(this.#curves.get(stage) ?? [])];
    // A poll before its time, since a request has ended, makes no point of its own.
    if (this.early) values.push(Math.max(value, values.pop() ?? 0));
    else values.push(value);
    values.splice(0, values.length - CURVE_POINTS);
    this.#curves.set(stage, values);
    const most = Math.max(...values);
    if (!most) return svg("svg", { class: "curve", viewBox: "0 0 118 22", preserveAspectRatio: "none", "aria-hidden": "true" });
    const place = (point, index) => `${(2 * (CURVE_POINTS - values.length + index)).toFixed(0)} ${(21 - (20 * point) / most).toFixed(1)}`;
    const line = values.map(place).join("L");
    const first = 2 * (CURVE_POINTS - values.length);
    return svg("svg", { class: "curve", viewBox: "0 0 118 22", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { class: "area", d: `M${first} 22L${line}L118 22Z` }), svg("path", { class: "line", d: `M${line}` }));
  }

  #drawMemory() {
    const rows = [];
    const tiers = {};
    for (const stage of this.#view.stages) {
      for (const process of stage.processes) {
        if (process.tokens && stage.stage !== "decode") for (const [tier, tokens] of Object.entries(process.tokens)) tiers[tier] = (tiers[tier] ?? 0) + tokens;
        for (const pool of process.pools) rows.push(poolRow(process, pool));
      }
    }
    const drawn = rows.map((row) => row.textContent + row.title).join("|") + JSON.stringify(tiers);
    if (drawn === this.memoryDrawn) return;
    this.memoryDrawn = drawn;
    byId("memory").replaceChildren(...(rows.length ? rows : [el("p.empty", {}, "Nothing is up yet.")]));
    byId("cache").replaceChildren(...tokenBar(tiers));
  }

  #drawRequests() {
    this.#drawn = "yes";
    const shown = this.#receipts.find((receipt) => receipt.sequence === this.#chosen) ?? this.#receipts.at(-1);
    byId("follow").hidden = this.#chosen === null;
    const box = byId("waterfall");
    box.replaceChildren(...(shown ? waterfall(shown) : [el("p.empty", {}, "Ask something: every step of the request will stand here, with its time.")]));
    const recent = byId("recent");
    if (!this.#receipts.length) {
      recent.replaceChildren(el("p.empty", {}, "None yet."));
      return;
    }
    const focused = document.activeElement?.dataset?.sequence;
    const head = el("tr", {}, ...[["Time"], ["Outcome"], ["In", "number"], ["Out", "number"], ["Took", "number"], ["Stages", "optional"]].map(([name, kind]) => el(`th${kind ? `.${kind}` : ""}`, { scope: "col" }, name)));
    const rows = [...this.#receipts].reverse().map((receipt) => this.#row(receipt, receipt === shown));
    const keptTop = recent.firstChild?.scrollTop ?? 0;
    recent.replaceChildren(el("div.recent-scroll", {}, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
    recent.firstChild.scrollTop = keptTop;
    const picks = this.#picks();
    const stop = picks.find((pick) => pick.dataset.sequence === this.#tabStop) ?? picks.find((pick) => pick.ariaPressed === "true");
    this.#setTabStop(stop);
    // A row that has gone leaves the focus to the oldest that is left.
    if (focused) (picks.find((pick) => pick.dataset.sequence === focused) ?? picks.at(-1)).focus();
  }

  #picks() {
    return [...byId("recent").querySelectorAll("button")];
  }

  /** The list is one stop of Tab, at the row last gone to, or else at the one that is shown. */
  #setTabStop(stop) {
    for (const pick of this.#picks()) pick.tabIndex = pick === stop ? 0 : -1;
    if (stop === document.activeElement) this.#tabStop = stop.dataset.sequence;
  }

  /** Within the list arrows go from row to row, Home and End to the newest and the oldest. */
  #moveFocus(event) {
    const picks = this.#picks();
    const index = picks.indexOf(event.target);
    const to = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: picks.length - 1 }[event.key];
    if (index < 0 || to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    picks[to]?.focus();
  }

  #row(receipt, isShown) {
    const failed = isFailed(receipt);
    const pick = el("button", { type: "button", data: { sequence: receipt.sequence }, "aria-pressed": String(isShown), title: receipt.request_id,
      onclick: () => this.choose(receipt.sequence) }, clock(receipt.arrival_unix_s));
    return el(isShown ? "tr.chosen" : "tr", {},
      el("td", {}, pick),
      el("td", {}, el(failed ? "span.failed" : "span", {}, outcomeOf(receipt))),
      el("td.number", {}, el("span", {}, count(receipt.prompt_tokens))),
      el("td.number", {}, el("span", {}, count(receipt.completion_tokens))),
      el("td.number", {}, el("span", {}, duration(receipt.duration_s))),
      el("td.optional", {}, mini(receipt)));
  }
}

/** What to tell of a stage: one big number, four lines, and how much moves. */
function factsOf({ stage, processes }, rate, sum, view) {
  const total = (counter) => processes.reduce((all, process) => all + (process.counters[counter] ?? 0), 0);
  const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "-");
  const queue = [["waiting", count(sum("waiting"))], ["running", count(sum("running"))]];
  switch (stage) {
    case "gateway":
      return {
        big: [sum("running"), "in flight"],
        lines: [["ended", count(total("requests"))], ["rate", `${rate("requests").toFixed(1)}/s`], ["at most", count(view.max_inflight)], ["up for", longer(view.uptime_s)]],
        moving: rate("requests"),
      };
    case "encode": {
      const asked = total("encoded") + total("hits") + total("joined") + total("recalled");
      const batches = total("batches");
      return {
        big: [sum("running"), sum("running") === 1 ? "medium" : "media"],
        lines: [["encoded", count(total("encoded"))], ["known", share(asked - total("encoded"), asked)], ["batch", batches ? (total("batch_jobs") / batches).toFixed(1) : "-"],
          ["tower busy", share(Math.min(processes.length, rate("tower_s")), processes.length)]],
        moving: rate("encoded") + rate("hits"),
      };
    }
    case "prefill": {
      const tokens = processes.map((process) => process.tokens).filter(Boolean);
      const cached = tokens.reduce((all, tiers) => all + tiers.l1 + tiers.l2 + tiers.l3, 0);
      const computed = tokens.reduce((all, tiers) => all + tiers.computed, 0);
      return {
        big: [rate("prompt_tokens"), "tok/s"],
        lines: [...queue, ["from cache", share(cached, cached + computed)], ["put back", count(total("retractions"))]],
        moving: rate("prompt_tokens"),
      };
    }
    default: {
      const steps = rate("steps");
      return {
        big: [rate("generated_tokens"), "tok/s"],
        lines: [...queue, ["batch", steps ? Math.max(1, rate("batched_sequences") / steps).toFixed(1) : "-"], ["drafts right", share(total("accepted_tokens"), total("drafted_tokens"))]],
        moving: rate("generated_tokens") + rate("prompt_tokens"),
      };
    }
  }
}

function processNode(process) {
  const load = process.ready ? (process.running + process.waiting ? `${process.running}+${process.waiting}` : "") : "";
  const memory = process.counters.process_resident_bytes;
  const words = process.ready ? `ready${memory ? `, ${bytes(memory)} of memory` : ""}` : process.reason;
  return el(process.ready ? "li" : "li.down", { title: `${process.name}: ${words}` },
    el("span", {}, process.name), el("span.hidden", {}, process.ready ? ", ready" : `, not ready: ${process.reason}`),
    load && el("span.load", { title: "running + waiting" }, load));
}

function wire(busy) {
  return svg("svg", { class: busy ? "wire busy" : "wire", viewBox: "0 0 20 10", "aria-hidden": "true" },
    svg("path", { d: "M1 5h16M13.5 1.500L17 5l-3.5 3.5" }), svg("path", { class: "flow", d: "M0 5h15" }));
}

function poolRow(process, pool) {
  const amount = (value) => (pool.unit === "bytes" ? bytes(value) : count(value));
  const states = [["leased", "in use"], ["cached", "kept"], ["free", "free"]];
  const words = states.map(([state, name]) => `${amount(pool[state])} ${name}`).join(", ");
  const bars = states.map(([state]) => placed(el(`span.${state}`), { width: `${pool.total ? (100 * pool[state]) / pool.total : 0}%` }));
  return el("div.row", { title: words },
    el("span.process", {}, process.name),
    el("span.kind", {}, POOLS[pool.pool]),
    el("div.pool", { role: "img", "aria-label": `${process.name}, ${POOLS[pool.pool]}: ${words}`, title: words }, ...bars),
    el("span.amount", {}, `${amount(pool.leased + pool.cached)} of ${amount(pool.total)}${pool.unit === "pages" ? " pages" : ""}`));
}

/** Shares of the stages in a request's time, as one small bar; what nothing measured is left empty. */
function mini(receipt) {
  const byStage = {};
  for (const step of receipt.steps) if (step.name !== "encoder") byStage[step.stage] = (byStage[step.stage] ?? 0) + step.duration_s;
  const spent = Object.values(byStage).reduce((sum, seconds) => sum + seconds, 0);
  const whole = Math.max(receipt.duration_s, spent, 1e-6);
  const parts = Object.entries(byStage).map(([stage, seconds]) => placed(el("i", { data: { stage } }), { width: `${(100 * seconds) / whole}%` }));
  const words = Object.entries(byStage).map(([stage, seconds]) => `${stage} ${duration(seconds)}`).join(", ");
  return el("div.mini", { role: "img", "aria-label": words, title: words }, ...parts);
}
