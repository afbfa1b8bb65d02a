// Building nodes. Text is only ever set as text: nothing on these pages goes through an HTML parser.

const SVG = "http://www.w3.org/2000/svg";

/** `el("button", {class: "plain", on: {click}}, "Text", node)`. False and null properties and children are left out. */
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (key === "text") node.textContent = value;
    else if (key === "class") node.className = value;
    else if (key === "value") node.value = value;
    else if (key === "checked") node.checked = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A symbol of the page's own sprite (`<symbol id="i-NAME">`); what it means is said by the text or label beside it. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "symbol");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows a symbol alone. */
export function iconButton(symbol, label, click, properties = {}) {
  return el("button", { type: "button", class: "icon plain", "aria-label": label, title: label, on: { click }, ...properties }, icon(symbol));
}

export const byId = (id) => document.getElementById(id);
