// The kept conversations: found, opened, removed, written to files and read from them.

import { byId, el, iconButton } from "../common/dom.js";
import { asMarkdown, matches } from "./conversation.js";
import { exportText, importText } from "./exchange.js";
import { conversations } from "./store.js";

export class Sidebar {
  constructor(chat, dialogs, tell) {
    Object.assign(this, { chat, dialogs, tell, all: [] });
    byId("search").addEventListener("input", () => this.draw());
    byId("new").addEventListener("click", () => chat.start());
    byId("export-all").addEventListener("click", async () => download("conversations.json", exportText(await conversations.all())));
    byId("export-one").addEventListener("click", () => download(`${fileName(chat.conversation)}.json`, exportText([chat.conversation])));
    byId("export-markdown").addEventListener("click", () => download(`${fileName(chat.conversation)}.md`, asMarkdown(chat.conversation)));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.read(event.target));
    byId("delete-all").addEventListener("click", () => this.removeAll());
    for (const button of document.querySelectorAll("#more button")) button.addEventListener("click", () => (byId("more").open = false));
    chat.addEventListener("saved", () => this.load());
    chat.addEventListener("open", () => this.draw());
  }

  async load() {
    this.all = await conversations.all();
    this.draw();
  }

  draw() {
    const query = byId("search").value.trim();
    const found = query ? this.all.filter((conversation) => matches(conversation, query)) : this.all;
    byId("conversations").replaceChildren(...found.map((conversation) => this.entry(conversation)));
    byId("none-found").hidden = found.length > 0;
    byId("none-found").textContent = query ? "Nothing found." : "Conversations are kept in this browser.";
  }

  entry(conversation) {
    const current = conversation.id === this.chat.conversation?.id;
    const title = conversation.title || "Untitled";
    const open = () => {
      // The one that is open may be further than what was kept of it.
      if (!current) this.chat.open(structuredClone(conversation));
      this.dialogs.closeDrawers();
    };
    const day = new Date(conversation.updated).toLocaleDateString(undefined, { day: "numeric", month: "short" });
    return el(
      "li",
      { class: current ? "current" : null },
      el("button", { type: "button", class: "plain entry", "aria-current": current ? "true" : null, on: { click: open } }, el("span", { text: title }), el("small", { class: "soft", text: day })),
      iconButton("trash", `Delete ${title}`, () => this.remove(conversation), { class: "icon plain remove" }),
    );
  }

  async remove(conversation) {
    if (!(await this.dialogs.confirm(`Delete “${conversation.title || "Untitled"}”?`, "It cannot be brought back.", "Delete"))) return;
    if (conversation.id === this.chat.conversation.id) this.chat.start();
    await conversations.remove(conversation.id);
    await this.load();
    this.tell("Deleted.");
  }

  async removeAll() {
    if (!(await this.dialogs.confirm("Delete all conversations?", `${this.all.length} of them are kept in this browser. They cannot be brought back.`, "Delete all"))) return;
    this.chat.start();
    await conversations.clear();
    await this.load();
    this.tell("All conversations are deleted.");
  }

  async read(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const found = importText(await file.text());
      for (const conversation of found) await conversations.put(conversation);
      await this.load();
      if (found.length) this.chat.open(found[0]);
      this.tell(`${found.length} conversation${found.length === 1 ? "" : "s"} imported.`);
    } catch (error) {
      this.tell(`${file.name} was not imported: ${error.message}`, true);
    }
  }
}

const fileName = ({ title }) => (title || "conversation").replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: name.endsWith(".md") ? "text/markdown" : "application/json" }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
