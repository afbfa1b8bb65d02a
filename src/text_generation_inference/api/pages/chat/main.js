// Puts the page together.

import { byId, el } from "../common/dom.js";
import { getDocument } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { find } from "./conversation.js";
import { Dialogs, makeTeller } from "./dialogs.js";
import { allowServers, Lanes } from "./lanes.js";
import { SettingsPanel } from "./settings_panel.js";
import { Sidebar } from "./sidebar.js";
import { facts, Status } from "./status.js";
import { Thread } from "./thread.js";

const SUGGESTIONS = ["Explain gravity in three sentences.", "Write a Python function that reverses a string.", "Give me a table of three planets and their moons.", "What is a good name for a cat?"];
const THEMES = ["auto", "light", "dark"];

function start() {
  const tell = makeTeller(byId("toast"), byId("live"));
  const chat = new Chat();
  const dialogs = new Dialogs();
  const composer = new Composer(chat, (text) => tell(text, true));
  const settings = new SettingsPanel(chat);
  const sidebar = new Sidebar(chat, dialogs, tell);
  const thread = new Thread(byId("scroller"), byId("thread"), byId("jump"), chat);
  const status = new Status((info) => {
    composer.setInfo(info);
    byId("facts").replaceChildren(...facts(info));
    byId("welcome-model").textContent = info.model_id;
    document.title = `${info.model_id} · Chat`;
  });
  new Lanes(chat);
  listen({ chat, dialogs, composer, thread, status, tell });
  wireHeader(chat, dialogs, settings);
  wireKeys(chat, dialogs);
  byId("suggestions").append(...SUGGESTIONS.map((text) => el("li", {}, el("button", { type: "button", text, on: { click: () => composer.write(text) } }))));
  document.addEventListener("tell", (event) => tell(event.detail));
  chat.start();
  sidebar.load();
  status.look();
  if (matchMedia("(pointer: fine)").matches) byId("message").focus();
  setTimeout(showLinks, 500);
}

function listen({ chat, dialogs, composer, thread, status, tell }) {
  const draw = () => {
    thread.show(chat.conversation, chat.running);
    byId("welcome").hidden = chat.conversation.messages.length > 0;
    if (document.activeElement !== byId("title")) byId("title").value = chat.conversation.title;
  };
  chat.addEventListener("open", () => {
    thread.clear();
    draw();
    composer.tellCount();
    dialogs.closeDrawers();
  });
  chat.addEventListener("changed", draw);
  chat.addEventListener("sent", () => {
    thread.follows = true;
    draw();
  });
  chat.addEventListener("running", () => {
    composer.update();
    draw();
    if (chat.isRunning) byId("live").textContent = "Answering";
  });
  chat.addEventListener("ended", ({ detail: message }) => {
    composer.tellCount();
    if (message.error) {
      if (message.error.kind === "offline" || message.error.status >= 500) status.look();
      if (message.error.kind === "key" && !document.querySelector("dialog[open]")) chat.askKey(message);
    } else if (status.state !== "ready") status.look();
    // The whole answer at once: word by word it could not be followed.
    byId("live").textContent = message.error ? `${message.error.text}` : `Answer: ${message.content || "calls a tool"}`;
  });
  chat.addEventListener("key", async ({ detail: message }) => {
    if (await dialogs.key(message.made.server ?? "", message.error?.text)) chat.retry(message, true);
  });
  chat.addEventListener("told", ({ detail }) => tell(detail));
  chat.addEventListener("problem", ({ detail }) => tell(detail, true));
  chat.addEventListener("edit", ({ detail }) => thread.viewOf(find(chat.conversation, detail)).edit());
  chat.addEventListener("focus", ({ detail }) => thread.viewOf(find(chat.conversation, detail)).buttons.querySelector("button:not(:disabled)")?.focus());
}

function wireHeader(chat, dialogs, settings) {
  byId("menu").addEventListener("click", () => {
    dialogs.openDrawer("sidebar");
    if (document.body.dataset.drawer) byId("search").focus();
  });
  const toggleSettings = () => {
    const panel = byId("settings");
    panel.hidden = !panel.hidden;
    byId("settings-button").setAttribute("aria-expanded", String(!panel.hidden));
    if (panel.hidden) byId("settings-button").focus();
    else {
      settings.prepare();
      byId("system").focus();
    }
  };
  byId("settings-button").addEventListener("click", toggleSettings);
  byId("close-settings").addEventListener("click", toggleSettings);
  byId("settings").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !chat.isRunning) toggleSettings();
  });
  byId("keys-button").addEventListener("click", () => byId("keys-dialog").showModal());
  byId("title").addEventListener("change", (event) => {
    chat.conversation.title = event.target.value.trim();
    chat.save();
  });
  const showTheme = () => {
    const label = `Colours: ${window.theme.get() === "auto" ? "as the system" : window.theme.get()}`;
    byId("theme").setAttribute("aria-label", label);
    byId("theme").title = label;
    byId("theme-symbol").setAttribute("href", `#i-${window.theme.get()}`);
  };
  byId("theme").addEventListener("click", () => {
    window.theme.set(THEMES[(THEMES.indexOf(window.theme.get()) + 1) % THEMES.length]);
    showTheme();
  });
  showTheme();
}

function wireKeys(chat, dialogs) {
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
    const command = event.ctrlKey || event.metaKey;
    const key = event.key.toLowerCase();
    if (key === "escape" && chat.isRunning) chat.stop();
    else if (key === "escape") dialogs.closeDrawers();
    else if (command && event.shiftKey && key === "o") chat.start();
    else if (command && key === "k") {
      if (getComputedStyle(byId("menu")).display !== "none") dialogs.openDrawer("sidebar");
      byId("search").focus();
    } else if (command && key === ",") byId("settings-button").click();
    else if (command && key === "/") byId("keys-dialog").showModal();
    else if (key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) byId("message").focus();
    else return;
    event.preventDefault();
  });
}

/** Other pages, as far as this server has them. */
async function showLinks() {
  try {
    const { paths } = await getDocument();
    byId("dashboard-link").hidden = !paths["/dashboard"];
  } catch {
    // links are a convenience
  }
}

if (allowServers()) start();
