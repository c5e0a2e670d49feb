// Puts the page together.

import { faultOfKey, getJson, setApiKey, wasKeyRefused } from "./api.js";
import { Attachments, Medium, waveform } from "./attachments.js";
import { Chat, grow } from "./chat.js";
import { byId, el, svg } from "./dom.js";
import { setUpMicrophone } from "./microphone.js";
import { PipelineView } from "./pipeline.js";
import { setUpSettings, setUpTheme } from "./settings.js";

let model = "";
let samples = null;
let kinds = ["image", "video", "audio"];
const question = byId("question");

function say(text) {
  byId("notice").textContent = text;
}

/** Asks for an API key; resolves to whether one was given. Whoever asks meanwhile gets the same answer. */
let asking = null;
function needKey(why, title = "This server asks for an API key") {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const field = byId("key");
    byId("key-title").textContent = title;
    byId("key-fault").textContent = "";
    byId("key-text").textContent = why && wasKeyRefused()
      ? `The server did not take this key: ${why}`
      : "It is sent to this server alone, kept once the server has taken it, and forgotten when the tab is closed.";
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "use" && field.value.trim();
      if (given) setApiKey(given);
      field.value = "";
      resolve(Boolean(given));
    }, { once: true });
    dialog.showModal();
    field.focus();
  });
  return asking;
}

byId("key-form").addEventListener("submit", (event) => {
  const fault = faultOfKey(byId("key").value.trim());
  byId("key-fault").textContent = fault ?? "";
  if (fault === null) return;
  event.preventDefault();
  byId("key").focus();
});

async function changeKey() {
  if (await needKey("", "Change the API key")) pipeline.hurry();
}

function sampleButton(sample) {
  const medium = new Medium(new File([sample.blob], sample.file, { type: sample.type }), sample.type.split("/")[0]);
  const shown = medium.kind === "audio" ? waveform() : medium.kind === "image" ? el("img", { src: medium.address, alt: "" }) : el("video", { src: medium.address, muted: true, playsinline: true, preload: "auto" });
  return el("button.sample", { type: "button", onclick: () => chat.ask(sample.question, [medium]) },
    el("span.shown", {}, shown), el("span", {}, sample.question));
}

/** What stands in an empty conversation. */
function welcome() {
  const isOurs = samples !== null && samples.model === model;
  return el("div.welcome", {},
    el("h2", {}, kinds.length ? "Ask about what you see, watch or hear." : "Ask something."),
    el("p", {}, kinds.length
      ? "Drop a picture, a video or a sound anywhere, paste one, or record. Beside the answer you see where its time goes."
      : "This model reads and writes text. Beside the answer you see where its time goes."),
    isOurs && el("div.samples", { role: "group", "aria-label": "Examples" }, ...samples.samples.map(sampleButton)),
    isOurs && el("p.note", {}, samples.note));
}

async function loadSamples() {
  const found = await getJson("/page/samples.json");
  for (const sample of found.samples) sample.blob = await (await fetch(`/page/${sample.file}`)).blob();
  samples = found;
  redrawWelcome();
}

function redrawWelcome() {
  document.querySelector(".welcome")?.replaceWith(welcome());
}

function onView(view) {
  const taken = view.stages.filter((stage) => stage.stage === "encode").flatMap((stage) => stage.processes.flatMap((process) => process.modalities));
  // While encoders start nothing is known; where there are none, no media are taken.
  if (taken.length || !view.stages.some((stage) => stage.stage === "encode")) showTaken([...new Set(taken)].sort());
  if (view.model === model) return;
  model = view.model;
  byId("model").textContent = model;
  document.title = `${model} - MiMo`;
  redrawWelcome();
}

function showTaken(taken) {
  if (taken.join() === kinds.toSorted().join()) return;
  kinds = taken;
  attachments.setTaken(kinds);
  question.placeholder = kinds.length ? "Ask about a picture, a video, a sound" : "Ask something";
  redrawWelcome();
}

const attachments = new Attachments({
  say,
  insert: (text) => {
    question.setRangeText(text, question.selectionStart, question.selectionEnd, "end");
    grow(question);
  },
});
const chat = new Chat({
  attachments,
  say,
  needKey,
  welcome,
  model: () => model,
  onEnd: () => pipeline.hurry(),
  showTiming: (requestId) => {
    if (!pipeline.chooseRequest(requestId)) say("The times of this answer are no longer kept.");
    else if (matchMedia("(max-width: 900px)").matches) byId("waterfall").parentElement.scrollIntoView({ behavior: "smooth" });
  },
});
const pipeline = new PipelineView({ needKey, onView });
const microphone = setUpMicrophone({ attachments, say });
setUpSettings();
setUpTheme(svg);

byId("change-key").addEventListener("click", changeKey);
for (const node of document.querySelectorAll(".dismiss")) {
  node.addEventListener("click", () => node.closest("dialog").close(""));
}
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.send();
});
byId("stop").addEventListener("click", () => {
  chat.stop();
  question.focus();
});
byId("new-chat").addEventListener("click", () => chat.clear());
question.addEventListener("input", () => grow(question));
question.addEventListener("keydown", (event) => {
  // While an input method composes, Enter is its own.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  chat.send();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (microphone.isRecording()) microphone.stop();
  else if (chat.isRunning) chat.stop();
});
addEventListener("beforeunload", (event) => {
  // Nothing of a conversation is kept: the browser asks before it is lost.
  if (!chat.isEmpty || !attachments.isEmpty || question.value.trim()) event.preventDefault();
});
loadSamples().catch(() => {
  // Without samples the page does all else.
});
