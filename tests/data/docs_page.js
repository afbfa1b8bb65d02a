// Runs the script of docs.html in node with a small document, opens every route, sends one, and prints what is shown.
// Usage: node docs_page.js SCRIPT ORIGIN OPERATION
"use strict";
const fs = require("fs");
const [script, origin, operation] = process.argv.slice(2);

class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], listeners: {}, value: "", open: false }); }
  append(...items) { this.children.push(...items); }
  addEventListener(name, listener) { (this.listeners[name] ||= []).push(listener); }
  setAttribute(name, value) { this[name] = value; }
  scrollIntoView() {}
  get textContent() { return this.children.map((item) => (item.textContent ?? String(item))).join(""); }
  set textContent(text) { this.children = text === "" ? [] : [text]; }
  fire(name, detail = {}) { return Promise.all((this.listeners[name] || []).map((listener) => listener(detail))); }
  *all() { yield this; for (const item of this.children) if (item instanceof Element) yield* item.all(); }
}

const fixed = Object.fromEntries(["routes", "key", "facts", "dot", "state", "document"].map((id) => [id, new Element("div")]));
globalThis.document = {
  createElement: (tag) => new Element(tag),
  getElementById: (id) => fixed[id] || [...fixed.routes.all()].find((element) => element.id === id) || null,
};
globalThis.location = { pathname: "/docs", origin, hash: "" };
globalThis.sessionStorage = { getItem: () => null, setItem: () => {} };
const plainFetch = globalThis.fetch;
globalThis.fetch = (url, options) => plainFetch(new URL(url, origin), options);

const find = (root, test) => [...root.all()].find(test);
const until = async (test) => { while (!test()) await new Promise((wake) => setTimeout(wake, 5)); };

(async () => {
  (0, eval)(fs.readFileSync(script, "utf-8"));
  await until(() => fixed.routes.children.length > 0 && fixed.state.textContent !== "looking…");
  const cards = [...fixed.routes.all()].filter((element) => element.className === "route");
  for (const card of cards) {
    card.open = true;
    await card.fire("toggle");
    for (const inner of [...card.all()].filter((element) => element.className === "inner")) { inner.open = true; await inner.fire("toggle"); }
  }
  const card = cards.find((element) => element.id === operation);
  const go = find(card, (element) => element.className === "go");
  await go.fire("click");
  console.log(JSON.stringify({
    operations: cards.map((element) => element.id),
    fields: [...card.all()].filter((element) => element.tag === "td").map((element) => element.textContent),
    text: find(card, (element) => element.className === "text").textContent,
    note: find(card, (element) => element.className === "bar").children.at(-1).textContent,
    facts: fixed.facts.textContent,
    state: fixed.state.textContent,
    title: globalThis.document.title,
  }));
})();
