// What every question is asked with. Kept in localStorage; the dialog checks before it keeps.

import { byId } from "./dom.js";

const KEY = "mimo.settings";
const EMPTY = { temperature: "", maxTokens: "", thinking: "", system: "", schema: "", functions: "" };
const FIELDS = { temperature: "temperature", maxTokens: "max-tokens", thinking: "thinking", system: "system", schema: "schema", functions: "functions" };

let current = load();

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    const strings = Object.entries(kept).filter(([name, value]) => name in EMPTY && typeof value === "string");
    return { ...EMPTY, ...Object.fromEntries(strings) };
  } catch {
    return { ...EMPTY };
  }
}

/** The fields of the request that the settings give, without `messages`. */
export function requestFields() {
  const fields = {};
  if (current.temperature) fields.temperature = Number(current.temperature);
  if (current.maxTokens) fields.max_tokens = Number(current.maxTokens);
  if (current.thinking) fields.chat_template_kwargs = { enable_thinking: current.thinking === "on" };
  if (current.schema) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(current.schema) } };
  }
  if (current.functions) fields.tools = JSON.parse(current.functions);
  return fields;
}

export const systemPrompt = () => current.system;

/** What is wrong with the values, for people; null when nothing is. */
function faultOf(values) {
  if (values.temperature && !(Number(values.temperature) >= 0 && Number(values.temperature) <= 2)) return ["temperature", "Temperature goes from 0 to 2."];
  if (values.maxTokens && !/^[1-9]\d*$/.test(values.maxTokens)) return ["maxTokens", "The longest answer is a whole number of tokens, from 1."];
  for (const [name, words, wanted] of [["schema", "The JSON schema", "object"], ["functions", "The list of tools", "list"]]) {
    if (!values[name]) continue;
    try {
      const parsed = JSON.parse(values[name]);
      const kind = Array.isArray(parsed) ? "list" : parsed === null ? "null" : typeof parsed;
      if (kind !== wanted) return [name, `${words} must be a JSON ${wanted}, not a ${kind}.`];
    } catch (error) {
      return [name, `${words} is not JSON: ${error.message}`];
    }
  }
  return null;
}

export function setUpSettings() {
  const dialog = byId("settings");
  const fault = byId("settings-fault");
  const show = (values) => {
    for (const [name, id] of Object.entries(FIELDS)) byId(id).value = values[name];
    fault.textContent = "";
  };
  byId("open-settings").addEventListener("click", () => {
    show(current);
    dialog.showModal();
  });
  byId("settings-reset").addEventListener("click", () => show(EMPTY));
  byId("settings-save").addEventListener("click", (event) => {
    const values = Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, byId(id).value.trim()]));
    // The browser keeps what is no number to itself.
    const unread = ["temperature", "max-tokens"].find((id) => byId(id).validity.badInput);
    const wrong = unread ? [unread === "temperature" ? "temperature" : "maxTokens", "That is not a number."] : faultOf(values);
    if (wrong) {
      event.preventDefault();
      fault.textContent = wrong[1];
      byId(FIELDS[wrong[0]]).focus();
      return;
    }
    current = values;
    try {
      localStorage.setItem(KEY, JSON.stringify(values));
    } catch {
      // Until the page is left, then.
    }
  });
}

const THEMES = { "": ["dark", "Theme: as the system"], dark: ["light", "Theme: dark"], light: ["", "Theme: light"] };
const PICTURES = {
  "": "M10 3a7 7 0 1 0 0 14zM10 3a7 7 0 0 1 0 14",
  dark: "M16 11.5A6.5 6.5 0 0 1 8.5 4 6.5 6.5 0 1 0 16 11.5z",
  light: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1 1M14.7 14.7l1 1M15.7 4.3l-1 1M5.3 14.7l-1 1",
};

export function setUpTheme(svg) {
  const toggle = byId("theme");
  const show = () => {
    const theme = document.documentElement.dataset.theme ?? "";
    const words = `${THEMES[theme][1]}. Change`;
    toggle.setAttribute("aria-label", words);
    toggle.title = words;
    toggle.replaceChildren(svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", { d: PICTURES[theme] })));
  };
  toggle.addEventListener("click", () => {
    const next = THEMES[document.documentElement.dataset.theme ?? ""][0];
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    try {
      if (next) localStorage.setItem("mimo.theme", next);
      else localStorage.removeItem("mimo.theme");
    } catch {
      // Until the page is left, then.
    }
    show();
  });
  show();
}
