// One message: its text, what belongs to it, and what can be done with it.

import { el, icon, iconButton } from "../common/dom.js";
import { copyText, MarkdownView } from "./markdown_view.js";
import { tokensNode } from "./tokens_view.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };
const ENDS = { length: "cut at the limit of tokens", stopped: "stopped" };

export class MessageView {
  /** `actions`: what the buttons do; see `Chat`. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.markdown = new MarkdownView();
    this.showsTokens = false;
    this.heading = el("h2", { class: "who" });
    this.body = el("div", { class: "body" });
    this.notes = el("p", { class: "notes small soft" });
    this.buttons = el("div", { class: "buttons" });
    this.node = el("article", { class: `message ${message.role}`, "data-id": message.id }, this.heading, this.body, el("footer", {}, this.buttons, this.notes));
    this.thoughts = null;
  }

  /** `state`: {running, chosen, side: whether others stand beside it, version, versions}. */
  update(state) {
    const { message } = this;
    this.node.classList.toggle("running", state.running);
    this.node.setAttribute("aria-busy", String(state.running));
    this.heading.replaceChildren(...this.title(state));
    if (!this.editing) {
      if (message.role === "assistant") this.updateAnswer(state);
      else if (!this.body.firstChild) this.showGiven();
    }
    if (message.role === "assistant") this.showNotes();
    const key = JSON.stringify([state, message.finish, Boolean(message.tokens), this.showsTokens, this.editing]);
    if (key !== this.shownButtons) this.buttons.replaceChildren(...this.makeButtons(state));
    this.shownButtons = key;
  }

  showNotes() {
    const { made = {} } = this.message;
    const told = notesOf(this.message);
    if (told === this.told) return;
    this.told = told;
    this.notes.textContent = told;
    if (made.seed === undefined) return;
    const use = () => this.actions.useSeed(made.seed);
    this.notes.append(told ? " · " : "", el("button", { type: "button", class: "plain", title: "Use this seed from now on", on: { click: use }, text: `seed ${made.seed}` }));
  }

  title(state) {
    const { message } = this;
    if (message.role !== "assistant") return [NAMES[message.role] + (message.name ? `: ${message.name}` : "")];
    const label = message.made?.label || message.made?.model || NAMES.assistant;
    return [label, state.side && state.chosen ? el("span", { class: "tag", text: "goes on" }) : ""];
  }

  // -- what was given ------------------------------------------------------------------------------------------------

  showGiven() {
    const { content, files = [], pictures = [] } = this.message;
    this.body.replaceChildren(
      ...pictures.map((url, index) => el("img", { src: url, alt: `Picture ${index + 1}`, class: "given" })),
      ...files.map((file) => el("details", { class: "file" }, el("summary", {}, icon("file"), file.name || "file"), el("pre", { tabindex: 0, role: "group", "aria-label": file.name || "file" }, file.text))),
    );
    if (content) this.body.append(el("div", { class: "plain-text", text: content }));
  }

  // -- an answer -----------------------------------------------------------------------------------------------------

  updateAnswer(state) {
    const { message } = this;
    const parts = [];
    if (message.reasoning) parts.push(this.thoughtsNode(state));
    if (this.showsTokens && message.tokens && !state.running) {
      const fork = message.reasoning || message.calls?.length ? null : (index, text) => this.actions.fork(message, index, text);
      this.tokens ??= tokensNode(message.tokens, fork);
      parts.push(this.tokens);
    } else {
      this.tokens = null;
      this.markdown.show(message.content);
      parts.push(this.markdown.node);
    }
    (message.calls ?? []).forEach((call, index) => call && parts.push(this.keep(`call${index}`, JSON.stringify(call), () => callNode(call))));
    if (message.calls?.length && !state.running && state.last) parts.push(this.resultsNode());
    if (state.running && !message.content && !message.reasoning && !message.calls) parts.push(this.keep("waiting", "", waitingNode));
    if (message.error) parts.push(this.keep("error", JSON.stringify([message.error, state.running]), () => this.errorNode(state)));
    if (!sameNodes(this.body.childNodes, parts)) this.body.replaceChildren(...parts);
  }

  /** The node made last under this name, unless what it shows has changed. */
  keep(name, key, make) {
    const kept = (this.kept ??= new Map()).get(name);
    if (kept?.key === key) return kept.node;
    const node = make();
    this.kept.set(name, { key, node });
    return node;
  }

  thoughtsNode(state) {
    const { message } = this;
    if (!this.thoughts) {
      this.thoughtsView = new MarkdownView();
      this.thoughtsTitle = el("summary");
      this.thoughts = el("details", { class: "thoughts" }, this.thoughtsTitle, this.thoughtsView.node);
    }
    const busy = state.running && !message.content;
    const count = message.made?.thoughts ? ` (${message.made.thoughts} tokens)` : "";
    const title = busy ? "Thinking ..." : `Thoughts${count}`;
    if (this.thoughtsTitle.textContent !== title) this.thoughtsTitle.textContent = title;
    this.thoughtsView.show(message.reasoning);
    return this.thoughts;
  }

  errorNode(state) {
    const { error } = this.message;
    const again = el("button", { type: "button", on: { click: () => this.actions.retry(this.message, true) } }, icon("retry"), "Try again");
    const key = el("button", { type: "button", class: "primary", on: { click: () => this.actions.askKey(this.message) } }, "Enter the key");
    return el("div", { class: "error", role: "alert" }, el("p", {}, el("strong", { text: titleOf(error) }), " ", error.text), state.running ? null : el("p", {}, error.kind === "key" ? key : again));
  }

  /** Where somebody can say what the tools found. */
  resultsNode() {
    if (this.results) return this.results;
    const { message } = this;
    const fields = message.calls.map((call, index) => {
      const id = `result-${message.id}-${index}`;
      return [el("label", { for: id, class: "small", text: `Result of ${call.name}` }), el("textarea", { id, rows: 2, "data-call": index })];
    });
    const submit = (event) => {
      event.preventDefault();
      this.actions.giveResults(message, [...this.results.querySelectorAll("textarea")].map((area) => area.value));
    };
    this.results = el("form", { class: "results", on: { submit } }, ...fields, el("button", { class: "primary", text: "Send the results" }));
    return this.results;
  }

  // -- what can be done ----------------------------------------------------------------------------------------------

  makeButtons(state) {
    const { message, actions } = this;
    if (this.editing) return [];
    const buttons = [];
    if (state.versions > 1) {
      buttons.push(
        iconButton("left", "Earlier version", () => actions.showVersion(message, -1), { disabled: state.version === 0 }),
        el("span", { class: "small soft version", text: `${state.version + 1} / ${state.versions}` }),
        iconButton("right", "Later version", () => actions.showVersion(message, 1), { disabled: state.version === state.versions - 1 }),
      );
    }
    if (state.running) return buttons;
    const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
    buttons.push(copy);
    if (message.role !== "tool") buttons.push(iconButton("edit", "Edit", () => this.edit()));
    if (message.role === "assistant") {
      buttons.push(iconButton("retry", "Retry", () => actions.retry(message)));
      if (["length", "stopped"].includes(message.finish) || message.error?.kind === "cut") buttons.push(iconButton("more", "Continue", () => actions.goOn(message)));
      if (message.tokens) {
        const toggle = () => {
          this.showsTokens = !this.showsTokens;
          this.update(state);
          this.buttons.querySelector("[aria-pressed]")?.focus();
        };
        buttons.push(iconButton("tokens", "Show tokens", toggle, { "aria-pressed": String(this.showsTokens) }));
      }
      if (state.side && !state.chosen) buttons.push(el("button", { type: "button", class: "small", on: { click: () => actions.pick(message) }, text: "Go on with this" }));
    }
    return buttons;
  }

  /** The text as a field. Saving makes a branch; what was there stays. */
  edit() {
    const { message } = this;
    const area = el("textarea", { "aria-label": "Text of the message", rows: Math.min(16, message.content.split("\n").length + 1), value: message.content });
    const end = () => {
      this.editing = false;
      this.body.replaceChildren();
      this.actions.redraw();
    };
    const save = () => {
      end();
      this.actions.edit(message, area.value);
    };
    const keydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
        this.buttons.querySelector("button")?.focus();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    };
    area.addEventListener("keydown", keydown);
    this.editing = true;
    const bar = el("div", { class: "edit-bar" }, el("button", { type: "button", class: "primary", on: { click: save }, text: message.role === "user" ? "Send" : "Save" }), el("button", { type: "button", on: { click: end }, text: "Cancel" }));
    this.body.replaceChildren(area, bar);
    this.actions.redraw();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

function sameNodes(shown, wanted) {
  return shown.length === wanted.length && wanted.every((node, index) => node === shown[index]);
}

const waitingNode = () => el("p", { class: "waiting soft" }, el("span", { class: "dots", "aria-hidden": "true" }), "Waiting for the first token");

function titleOf({ kind, status }) {
  const titles = { offline: "No connection.", key: "A key is needed.", overloaded: "Overloaded.", refused: "Refused.", cut: "Cut off.", failed: "Failed." };
  return (titles[kind] ?? "Failed.") + (status ? ` (${status})` : "");
}

function callNode(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // still coming, or not JSON: as it is
  }
  return el("div", { class: "call" }, el("p", {}, icon("tool"), "Calls ", el("code", { text: call.name || "..." })), el("pre", { tabindex: 0, role: "group", "aria-label": `Arguments of ${call.name}` }, text));
}

/** Tokens, speed, what the prefix cache had, and why it ended, as far as it is known. */
function notesOf({ made = {}, finish }) {
  const notes = [];
  if (made.tokens) notes.push(`${made.tokens} token${made.tokens === 1 ? "" : "s"}`);
  if (made.per_second) notes.push(`${made.per_second.toFixed(1)} tokens/s`);
  if (made.first_ms) notes.push(`first after ${(made.first_ms / 1000).toFixed(2)} s`);
  if (made.prompt) notes.push(`prompt ${made.prompt}${made.cached ? `, ${made.cached} of it from the cache` : ""}`);
  if (ENDS[finish]) notes.push(ENDS[finish]);
  return notes.join(" · ");
}
