// Server-sent events from chunks that may be cut anywhere: inside a line, inside CR LF, inside a character.

/** `push(bytes)` and `close()` give the data of every event that has become whole. */
export class EventParser {
  #decoder = new TextDecoder();
  #rest = "";
  #data = [];

  push(bytes) {
    return this.#read(this.#decoder.decode(bytes, { stream: true }));
  }

  /** What was cut off before its empty line is no event. */
  close() {
    const events = this.#read(this.#decoder.decode());
    this.#rest = "";
    this.#data = [];
    return events;
  }

  #read(text) {
    const events = [];
    let buffer = this.#rest + text;
    for (;;) {
      const end = buffer.search(/\r\n|\n|\r/);
      // A CR at the very end may be half of a CR LF.
      if (end < 0 || (buffer[end] === "\r" && end === buffer.length - 1)) break;
      const line = buffer.slice(0, end);
      buffer = buffer.slice(end + (buffer[end] === "\r" && buffer[end + 1] === "\n" ? 2 : 1));
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      } else if (line === "data") {
        this.#data.push("");
      }
    }
    this.#rest = buffer;
    return events;
  }
}
