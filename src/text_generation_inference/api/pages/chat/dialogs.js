// Questions to the person, and panels that cover the page on small screens.

import { byId, el } from "../common/dom.js";
import { keys } from "./api.js";

export class Dialogs {
  constructor() {
    this.pending = null;
    for (const dialog of document.querySelectorAll("dialog")) {
      dialog.addEventListener("click", (event) => event.target === dialog && dialog.close(""));
      for (const button of dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => dialog.close(button.dataset.close));
    }
    byId("veil").addEventListener("click", () => this.closeDrawers());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      byId("key-dialog").close("use");
    });
  }

  /** Whether the person agrees. */
  confirm(title, text, action) {
    byId("confirm-title").textContent = title;
    byId("confirm-text").textContent = text;
    byId("confirm-do").textContent = action;
    return this.ask(byId("confirm-dialog")).then((answer) => answer === "yes");
  }

  /** A key for a server; whether one was given. It is kept for this tab alone. */
  async key(server, text) {
    byId("key-text").textContent = text || "The server asks for an API key.";
    byId("key-server").textContent = server || "this server";
    byId("key").value = keys.get(server);
    const answer = await this.ask(byId("key-dialog"));
    if (answer !== "use") return false;
    keys.set(server, byId("key").value.trim());
    byId("key").value = "";
    return true;
  }

  ask(dialog) {
    return new Promise((resolve) => {
      dialog.returnValue = "";
      dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
      dialog.showModal();
    });
  }

  openDrawer(name) {
    const open = document.body.dataset.drawer === name;
    this.closeDrawers();
    if (!open) document.body.dataset.drawer = name;
    byId("menu").setAttribute("aria-expanded", String(!open && name === "sidebar"));
  }

  closeDrawers() {
    delete document.body.dataset.drawer;
    byId("menu").setAttribute("aria-expanded", "false");
  }
}

/** Short words at the edge of the screen, and for screen readers. */
export function makeTeller(box, live) {
  let timer = 0;
  return (text, problem = false) => {
    live.textContent = text;
    box.replaceChildren(el("p", { class: problem ? "bad" : null, text }));
    box.hidden = false;
    clearTimeout(timer);
    timer = setTimeout(() => (box.hidden = true), problem ? 8000 : 3000);
  };
}
