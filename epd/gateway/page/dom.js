// Building nodes. Text always goes in as text: nothing in this page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** `el("button.quiet", {type: "button", onclick}, "Copy")`. Functions become listeners, `data` a dataset, null is left out. */
export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  return filled(node, attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "muted") node.muted = true;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Widths and places of bars. The policy of the page forbids style attributes; the object model is allowed. */
export function placed(node, styles) {
  for (const [key, value] of Object.entries(styles)) node.style.setProperty(key, value);
  return node;
}

export function button(text, onclick, attributes = {}) {
  return el("button.button.quiet.small", { type: "button", onclick, ...attributes }, text);
}
