// Recording a sound. The browser asks the person; when it does not or the answer is no, the page says what to do.

import { byId } from "./dom.js";
import { Medium } from "./attachments.js";

const REFUSALS = {
  NotAllowedError: "The microphone is not allowed for this page. Allow it in the browser's site settings, next to the address.",
  NotFoundError: "There is no microphone on this device.",
  NotReadableError: "The microphone is in use by another program.",
  SecurityError: "The browser gives no microphone to this page.",
};
const MAX_SECONDS = 300;

export function setUpMicrophone({ attachments, say }) {
  const toggle = byId("microphone");
  const text = byId("microphone-text");
  let recorder = null;

  const idle = () => {
    recorder = null;
    toggle.setAttribute("aria-pressed", "false");
    text.textContent = "Record";
  };

  const begin = async () => {
    if (!isSecureContext || !navigator.mediaDevices?.getUserMedia) {
      say("Browsers give the microphone only to pages on https or on localhost. Drop or attach a sound file instead.");
      return;
    }
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (fault) {
      say(REFUSALS[fault.name] ?? `No microphone: ${fault.message}`);
      return;
    }
    say("");
    const chunks = [];
    recorder = new MediaRecorder(stream);
    const started = performance.now();
    const ticking = setInterval(() => {
      const seconds = Math.floor((performance.now() - started) / 1000);
      text.textContent = `Stop ${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
      if (seconds >= MAX_SECONDS) recorder?.stop();
    }, 250);
    recorder.addEventListener("dataavailable", (event) => event.data.size && chunks.push(event.data));
    recorder.addEventListener("stop", () => {
      clearInterval(ticking);
      for (const track of stream.getTracks()) track.stop();
      const type = chunks[0]?.type || "audio/webm";
      idle();
      if (!chunks.length) {
        say("Nothing was recorded.");
        return;
      }
      const ending = type.includes("mp4") ? "m4a" : type.includes("ogg") ? "ogg" : "webm";
      attachments.put(new Medium(new File(chunks, `recording.${ending}`, { type }), "audio"));
      byId("question").focus();
    });
    recorder.start();
    toggle.setAttribute("aria-pressed", "true");
    text.textContent = "Stop 0:00";
  };

  toggle.addEventListener("click", () => (recorder ? recorder.stop() : begin()));
  return { isRecording: () => recorder !== null, stop: () => recorder?.stop() };
}
