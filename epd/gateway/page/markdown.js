// A small Markdown, built from nodes: paragraphs, headings, lists and lists within them, tables, quotes, code, bold,
// italic. Links are not made: a model must not send people anywhere. Anything else stays as it was written.

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

const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])(?: +(.*))?$/;

function split(text) {
  const blocks = [];
  let lines = [];
  // An empty line within a list parts no list from the rest of it.
  let isApart = false;
  let fence = null;
  const finish = (kind) => {
    if (lines.length) blocks.push({ kind, lines, source: `${kind}\n${lines.join("\n")}` });
    lines = [];
    isApart = false;
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
    } else if (line.trim() === "") {
      if (lines.length && ITEM.test(lines[0])) isApart = true;
      else finish("text");
    } else {
      if (isApart && !ITEM.test(line) && !/^\s{2}/.test(line)) finish("text");
      isApart = false;
      lines.push(line);
    }
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
  // Lists that are open, the outermost first, with the column that their marks stand in.
  let open = [];
  const finish = () => {
    if (plain.length) parts.push(el("p", {}, ...inlineLines(plain)));
    plain = [];
  };
  for (let index = 0; index < lines.length; index += 1) {
    const line = lines[index].replaceAll("\t", "    ");
    const heading = /^(#{1,4}) +(.*)$/.exec(line);
    const item = ITEM.exec(line);
    const isText = !item && !heading;
    const rows = isText ? tableRows(lines, index) : 0;
    if (item && !(plain.length && item[4] === undefined)) {
      finish();
      open = withItem(open, parts, item);
    } else if (heading) {
      finish();
      open = [];
      parts.push(el(`h${Math.min(5, heading[1].length + 2)}`, {}, ...inline(heading[2])));
    } else if (rows) {
      finish();
      open = [];
      parts.push(table(lines.slice(index, index + rows)));
      index += rows - 1;
    } else if (open.length && /^\s/.test(line)) {
      open.at(-1).list.lastChild.append(el("br"), ...inline(line.trim()));
    } else {
      open = [];
      plain.push(line);
    }
  }
  finish();
  return parts.length === 1 ? parts[0] : el("div.parts", {}, ...parts);
}

/** An item goes into the list whose marks stand where its own does, or into a new one within the item before it. */
function withItem(open, parts, [, space, mark, number, text = ""]) {
  const tag = mark ? "ul" : "ol";
  const lists = open.filter(({ column }, depth) => depth === 0 || space.length >= column);
  const last = lists.at(-1);
  const isWithin = last !== undefined && space.length >= last.column + 2;
  if (isWithin || last?.list.localName !== tag) {
    const list = el(tag, tag === "ol" && number !== "1" ? { start: number } : {});
    if (!isWithin) lists.pop();
    const outer = lists.at(-1)?.list.lastChild;
    if (outer) outer.append(list);
    else parts.push(list);
    lists.push({ list, column: space.length });
  }
  lists.at(-1).list.append(el("li", {}, ...inline(text)));
  return lists;
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** How many lines from there on are a table: names, a rule with as many columns, rows. 0 for none. */
function tableRows(lines, start) {
  const rule = lines[start + 1] ?? "";
  if (!lines[start].includes("|") || !rule.includes("|") || !cells(rule).every((cell) => /^:?-+:?$/.test(cell))) return 0;
  if (cells(rule).length !== cells(lines[start]).length) return 0;
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return end - start;
}

function table([names, rule, ...rows]) {
  const sides = cells(rule).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (tag, line) => {
    const found = cells(line);
    return el("tr", {}, ...sides.map((side, column) => el(tag, { "data-align": side }, ...inline(found[column] ?? ""))));
  };
  return el("div.table", { tabindex: "0", role: "group", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row("th", names)), el("tbody", {}, ...rows.map((line) => row("td", line)))));
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
