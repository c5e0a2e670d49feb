// A small Markdown, built from nodes: paragraphs, headings, lists, quotes, code, bold, italic. Links are not made: a
// model must not send people anywhere. Anything else stays as it was written.

import { button, el } from "./dom.js";

/** Shows a text that grows. Blocks that have not changed stay, so a long answer costs what is new. */
export class MarkdownView {
  #shown = [];

  constructor(node) {
    this.node = node;
  }

  show(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && same < this.#shown.length && blocks[same].source === this.#shown[same].source) same += 1;
    for (const old of this.#shown.splice(same)) old.node.remove();
    for (const block of blocks.slice(same)) {
      const node = rendered(block);
      this.node.append(node);
      this.#shown.push({ source: block.source, node });
    }
  }
}

function split(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const finish = (kind) => {
    if (lines.length) blocks.push({ kind, lines, source: `${kind}\n${lines.join("\n")}` });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^ {0,3}(```+|~~~+)/.exec(line);
    if (fence !== null) {
      if (mark && mark[1].startsWith(fence) && line.trim() === mark[1]) {
        finish("code");
        fence = null;
      } else lines.push(line);
    } else if (mark) {
      finish("text");
      fence = mark[1];
      lines.push(line.trim().slice(fence.length).trim());
    } else if (line.trim() === "") finish("text");
    else lines.push(line);
  }
  finish(fence === null ? "text" : "code");
  return blocks;
}

function rendered({ kind, lines }) {
  if (kind === "code") return codeBlock(lines[0], lines.slice(1).join("\n"));
  if (lines.every((line) => line.startsWith(">"))) {
    return el("blockquote", {}, ...inlineLines(lines.map((line) => line.replace(/^> ?/, ""))));
  }
  const parts = [];
  let plain = [];
  const finish = () => {
    if (plain.length) parts.push(el("p", {}, ...inlineLines(plain)));
    plain = [];
  };
  let list = null;
  for (const line of lines) {
    const heading = /^(#{1,4}) +(.*)$/.exec(line);
    const item = /^ {0,6}(?:([-*+])|(\d{1,4})[.)]) +(.*)$/.exec(line);
    if (item) {
      finish();
      const tag = item[1] ? "ul" : "ol";
      if (list?.localName !== tag) {
        list = el(tag, tag === "ol" && item[2] !== "1" ? { start: item[2] } : {});
        parts.push(list);
      }
      list.append(el("li", {}, ...inline(item[3])));
    } else if (heading) {
      finish();
      list = null;
      parts.push(el(`h${Math.min(5, heading[1].length + 2)}`, {}, ...inline(heading[2])));
    } else if (list && /^\s/.test(line)) {
      list.lastChild.append(el("br"), ...inline(line.trim()));
    } else {
      list = null;
      plain.push(line);
    }
  }
  finish();
  return parts.length === 1 ? parts[0] : el("div.body", {}, ...parts);
}

function codeBlock(language, text) {
  const copy = button("Copy", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
  }, { "aria-label": "Copy this code" });
  return el("div.code-block", {}, el("pre", { tabindex: "0", "data-language": language || null }, el("code", {}, text)), copy);
}

function inlineLines(lines) {
  return lines.flatMap((line, index) => (index ? [el("br"), ...inline(line)] : inline(line)));
}

// Code first: stars in it are stars. Marks inside words (2*3*4, a_b_c) are none.
const MARKS = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?![\w*])/;

function inline(text) {
  const nodes = [];
  for (let rest = text; rest; ) {
    const found = MARKS.exec(rest);
    if (!found) {
      nodes.push(rest);
      break;
    }
    if (found.index) nodes.push(rest.slice(0, found.index));
    if (found[2] !== undefined) nodes.push(el("code", {}, found[2]));
    else if (found[3] !== undefined) nodes.push(el("strong", {}, ...inline(found[3])));
    else nodes.push(el("em", {}, ...inline(found[4])));
    rest = rest.slice(found.index + found[0].length);
  }
  return nodes;
}
