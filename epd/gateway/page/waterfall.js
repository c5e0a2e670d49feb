// Where the time of one request went, and where its prompt's tokens came from. A receipt in, nodes out.

import { el, placed } from "./dom.js";
import { count, duration, plural } from "./format.js";

const STEPS = {
  "gateway read": "receive",
  "gateway parse": "check",
  "gateway render": "write prompt",
  "gateway fetch": "fetch media",
  "gateway encoder": "await encoder",
  "gateway assemble": "place media",
  "gateway dispatch": "choose worker",
  "encode queue": "queue",
  "encode prepare": "decode media",
  "encode batch_wait": "await batch",
  "encode tower": "tower",
  "prefill queue": "queue",
  "prefill compute": "compute prompt",
  "transfer inputs": "embeddings",
  "transfer kv": "KV to decode",
  "decode queue": "queue",
  "decode decode": "write answer",
};
const WAITS = new Set(["queue", "batch_wait", "encoder"]);
// Tokens that came at once have no rate.
const MIN_SPAN_S = 0.05;
export const TIERS = [
  ["l1", "device"],
  ["l2", "host"],
  ["l3", "store"],
  ["healed", "healed"],
  ["computed", "computed"],
];

export function waterfall(receipt) {
  return [
    about(receipt),
    ...(receipt.steps.length ? [steps(receipt)] : []),
    ...(receipt.prompt_tokens && isComputed(receipt) ? [el("h4.subhead", {}, `${plural(receipt.prompt_tokens, "prompt token")}, by where they came from`), ...tokenBar(tiersOf(receipt))] : []),
  ];
}

/** A request that failed before prefill took its tokens from nowhere. */
export function isComputed(receipt) {
  return !isFailed(receipt) || receipt.first_token_s !== null || receipt.steps.some(({ stage, name }) => stage === "prefill" && name === "compute");
}

/** Tokens by tier. What was healed lies between what was cached and what was computed: no token is counted twice. */
export function tiersOf(receipt) {
  const { l1, l2, l3, healed } = receipt.cache_tokens;
  return { l1, l2, l3, healed, computed: Math.max(0, receipt.prompt_tokens - l1 - l2 - l3 - healed) };
}

function about(receipt) {
  const facts = [[duration(receipt.duration_s), "in all"]];
  if (receipt.first_token_s !== null) {
    facts.push([duration(receipt.first_token_s), "to the first token"]);
    const rest = receipt.duration_s - receipt.first_token_s;
    if (receipt.completion_tokens > 2 && rest > MIN_SPAN_S) facts.push([count((receipt.completion_tokens - 1) / rest), "tokens/s after it"]);
  }
  if (receipt.completion_tokens) facts.push([count(receipt.completion_tokens), "tokens written"]);
  for (const [modality, tokens] of Object.entries(receipt.media_tokens)) if (tokens) facts.push([count(tokens), `${modality} tokens`]);
  if (receipt.cached_media) facts.push([count(receipt.cached_media), receipt.cached_media === 1 ? "medium known already" : "media known already"]);
  if (receipt.num_attempts > 1) facts.push([count(receipt.num_attempts), "attempts"]);
  const outcome = isFailed(receipt) ? el("span.failed", {}, outcomeOf(receipt)) : el("span", {}, outcomeOf(receipt));
  return el("p.about", {}, outcome, ...facts.map(([value, words]) => el("span", {}, el("b", {}, value), ` ${words}`)));
}

export const isFailed = (receipt) => receipt.status >= 400;

export function outcomeOf(receipt) {
  if (receipt.finish_reason === "cancelled") return "client left";
  if (isFailed(receipt)) return `${receipt.error ?? "failed"} (${receipt.status})`;
  return { stop: "answered", length: "cut at its limit", tool_calls: "called a tool" }[receipt.finish_reason] ?? receipt.finish_reason;
}

function steps(receipt) {
  const whole = Math.max(receipt.duration_s, ...receipt.steps.map((step) => step.start_s + step.duration_s), 1e-6);
  // Media and choices are numbered as they come, where there is more than one.
  const items = [...new Set(receipt.steps.map((step) => step.item).filter(Boolean))].sort();
  const rows = [...receipt.steps].sort((a, b) => a.start_s - b.start_s || b.duration_s - a.duration_s).map((step) => {
    const words = STEPS[`${step.stage} ${step.name}`] ?? step.name;
    const left = (100 * step.start_s) / whole;
    const width = Math.max(0, Math.min(100 - left, (100 * step.duration_s) / whole));
    const bar = placed(el(WAITS.has(step.name) ? "span.span.wait" : "span.span"), { left: `min(${left.toFixed(3)}%, calc(100% - 3px))`, width: `${width.toFixed(3)}%` });
    const title = `${step.stage}: ${words}${step.item ? `, ${step.item}` : ""}. From ${duration(step.start_s)} on, for ${duration(step.duration_s)}`;
    return el("div.row", { role: "row", data: { stage: step.stage } },
      el("span.label", { role: "rowheader", title: step.item || null }, el("b", {}, step.stage), ` ${words}${step.item && items.length > 1 ? ` ${items.indexOf(step.item) + 1}` : ""}`),
      el("span.track", { role: "cell", title }, bar, receipt.first_token_s === null ? null : placed(el("span.first", { title: "first token" }), { left: `${((100 * receipt.first_token_s) / whole).toFixed(3)}%` })),
      el("span.time", { role: "cell" }, duration(step.duration_s)));
  });
  const axis = [0, 0.5, 1].map((share) => el("span", {}, share ? duration(whole * share) : "0"));
  return el("div.steps", { role: "table", "aria-label": "Steps of the request" }, ...rows, el("div.axis", { "aria-hidden": "true" }, ...axis));
}

/** A bar of tokens by tier, and what its colours mean. */
export function tokenBar(tokens) {
  const known = TIERS.filter(([tier]) => tokens[tier]);
  const total = known.reduce((sum, [tier]) => sum + tokens[tier], 0);
  const words = known.map(([tier, name]) => `${count(tokens[tier])} ${name}`);
  return [
    el("div.tokens", { role: "img", "aria-label": words.join(", ") || "none" },
      ...known.map(([tier]) => placed(el(`span.tier-${tier}`), { width: `${(100 * tokens[tier]) / total}%` }))),
    el("ul.legend", {}, ...TIERS.map(([tier, name]) => el(`li.tier-${tier}`, {}, el("b", {}, count(tokens[tier] ?? 0)), ` ${name}`))),
  ];
}
