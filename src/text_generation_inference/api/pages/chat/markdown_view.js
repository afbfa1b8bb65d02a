// Markdown as nodes of the page. Only elements made here appear, whatever the text says; links lead to the web or to mail.

import { el, icon } from "../common/dom.js";
import { highlight } from "./highlight.js";
import { parseBlocks } from "./markdown_blocks.js";
import { parseInline, pictureData, safeUrl } from "./markdown_inline.js";
import { mathNode } from "./math.js";

const ELEMENTS = { strong: "strong", emphasis: "em", deleted: "del" };

/** Shows a text that may grow: `show` makes again only the blocks that have changed. */
export class MarkdownView {
  constructor() {
    this.node = el("div", { class: "markdown" });
    this.text = "";
    this.shown = []; // [source, node]
  }

  show(text) {
    if (text === this.text) return;
    this.text = text;
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && this.shown[same][0] === blocks[same].source) same += 1;
    for (const [, node] of this.shown.splice(same)) node.remove();
    for (const block of blocks.slice(same)) {
      const node = blockNode(block);
      this.node.append(node);
      this.shown.push([block.source, node]);
    }
  }
}

function blockNode(block) {
  switch (block.type) {
    case "heading":
      // Headings of an answer stand below those of the page.
      return el(`h${Math.min(6, block.level + 2)}`, { class: `h${block.level}` }, inlineNodes(block.text));
    case "rule":
      return el("hr");
    case "code":
      return codeNode(block);
    case "math":
      return el("div", { class: "formula", tabindex: 0, role: "group", "aria-label": "Formula" }, mathNode(block.text, true));
    case "quote":
      return el("blockquote", {}, block.blocks.map(blockNode));
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    default:
      return el("p", {}, inlineNodes(block.text));
  }
}

function listNode(list) {
  const items = list.items.map((item) => {
    const content = item.blocks.map((block) => (block.type === "paragraph" && !list.loose ? el("span", { class: "tight" }, inlineNodes(block.text)) : blockNode(block)));
    if (item.task === null) return el("li", {}, content);
    const box = el("input", { type: "checkbox", disabled: true, checked: item.task, "aria-label": item.task ? "done" : "to do" });
    return el("li", { class: "task" }, box, content);
  });
  return el(list.ordered ? "ol" : "ul", { start: list.ordered && list.start !== 1 ? list.start : null }, items);
}

function tableNode({ head, rows, align }) {
  const row = (cells, name) => el("tr", {}, cells.map((cell, column) => el(name, { class: align[column] || null, scope: name === "th" ? "col" : null }, inlineNodes(cell))));
  const table = el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, rows.map((cells) => row(cells, "td"))));
  return el("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Table" }, table);
}

function codeNode({ language, text }) {
  const pieces = highlight(text, language).map(([kind, piece]) => (kind ? el("span", { class: `c-${kind}`, text: piece }) : piece));
  const copy = el("button", { type: "button", class: "plain copy" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", { text: language || "text" }), copy),
    el("pre", { tabindex: 0, "aria-label": language ? `Code, ${language}` : "Code", role: "group" }, el("code", {}, pieces)),
  );
}

/** Puts a text into the clipboard and says so on the button that was pressed. */
export async function copyText(text, button) {
  const label = button.lastChild.nodeType === Node.TEXT_NODE ? button.lastChild : null;
  const before = label?.data;
  let told = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    told = copyBySelection(text) ? "Copied" : "Not allowed";
  }
  button.dispatchEvent(new CustomEvent("tell", { bubbles: true, detail: told }));
  if (label) {
    label.data = told;
    setTimeout(() => (label.data = before), 1500);
  }
}

/** Pages that came over plain HTTP have no clipboard; the older way still works there. */
function copyBySelection(text) {
  const area = el("textarea", { value: text, class: "unseen", "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

function inlineNodes(text) {
  return parseInline(text).map(inlineNode);
}

function inlineNode(node) {
  switch (node.type) {
    case "text":
      return document.createTextNode(node.text);
    case "break":
      return el("br");
    case "code":
      return el("code", { text: node.text });
    case "math":
      return mathNode(node.text, node.display);
    case "link":
      return linkNode(node.url, node.children.map(inlineNode));
    case "picture": {
      const data = pictureData(node.url);
      return data ? el("img", { src: data, alt: node.alt, class: "drawn" }) : linkNode(node.url, [`picture: ${node.alt || node.url}`]);
    }
    default:
      return el(ELEMENTS[node.type], {}, node.children.map(inlineNode));
  }
}

function linkNode(url, children) {
  const href = safeUrl(url);
  if (!href) return el("span", {}, children);
  return el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
