// The shown path of a conversation: a view for each message, answers that were made together side by side.

import { el } from "../common/dom.js";
import { companions, pathOf, versions } from "./conversation.js";
import { MessageView } from "./message_view.js";

const NEAR = 96; // pixels from the end within which the view follows a growing answer

export class Thread {
  constructor(scroller, list, jump, actions) {
    Object.assign(this, { scroller, list, jump, actions });
    this.views = new Map();
    this.follows = true;
    scroller.addEventListener("scroll", () => this.look(), { passive: true });
    jump.addEventListener("click", () => this.toEnd());
  }

  look() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR;
    this.jump.hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.jump.hidden = true;
  }

  /** `running`: ids of answers that are on their way. */
  show(conversation, running) {
    const path = pathOf(conversation);
    const wanted = path.map((message, index) => this.entry(conversation, message, running, index === path.length - 1));
    const ids = new Set(wanted.flatMap(({ shown }) => shown));
    for (const id of this.views.keys()) if (!ids.has(id)) this.views.delete(id);
    const nodes = wanted.map(({ node }) => node);
    if (nodes.length !== this.list.children.length || nodes.some((node, index) => node !== this.list.children[index])) this.list.replaceChildren(...nodes);
    if (this.follows) this.toEnd();
    else this.look();
  }

  entry(conversation, message, running, last) {
    const together = companions(conversation, message);
    const all = versions(conversation, message);
    const state = (one) => ({
      running: running.has(one.id),
      chosen: one.id === message.id,
      side: together.length > 1,
      version: all.findIndex((other) => (other.group ?? other.id) === (one.group ?? one.id)),
      versions: all.length,
      last,
    });
    const views = together.map((one) => {
      const view = this.viewOf(one);
      view.update(state(one));
      view.node.classList.toggle("chosen", one.id === message.id && together.length > 1);
      return view;
    });
    const shown = together.map((one) => one.id);
    if (views.length === 1) return { node: views[0].node, shown };
    const key = `side:${message.group}`;
    const node = this.sides?.get(key) ?? el("div", { class: "side-by-side", role: "group", "aria-label": `${views.length} answers side by side` });
    (this.sides ??= new Map()).set(key, node);
    if (node.children.length !== views.length || views.some((view, index) => node.children[index] !== view.node)) node.replaceChildren(...views.map((view) => view.node));
    return { node, shown };
  }

  viewOf(message) {
    let view = this.views.get(message.id);
    if (!view || view.message !== message) {
      view = new MessageView(message, this.actions);
      this.views.set(message.id, view);
    }
    return view;
  }

  clear() {
    this.views.clear();
    this.sides?.clear();
    this.list.replaceChildren();
    this.follows = true;
  }
}
