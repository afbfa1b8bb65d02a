// Where a message is written. Enter sends, Shift+Enter makes a line; on phones Enter makes a line.

import { byId } from "../common/dom.js";
import { countTokens } from "./api.js";
import { Attachments } from "./attachments.js";
import { pathOf } from "./conversation.js";

const COUNT_MS = 500; // after the last key
const isTouch = matchMedia("(pointer: coarse)");

export class Composer {
  constructor(chat, tell) {
    Object.assign(this, { chat, form: byId("composer"), area: byId("message"), info: null });
    this.attachments = new Attachments(byId("attachments"), tell);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (chat.isRunning) chat.stop();
      else this.send();
    });
    this.area.addEventListener("input", () => this.grow());
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    byId("attachments").addEventListener("change", () => this.update());
    this.takeFiles();
    this.update();
  }

  setInfo(info) {
    this.info = info;
    this.attachments.sees = info?.pictures ?? null;
    byId("attach").title = this.attachments.sees ? "Add pictures or text files" : "Add text files";
    byId("attach").setAttribute("aria-label", byId("attach").title);
    this.update();
  }

  takeFiles() {
    const { attachments } = this;
    const picker = byId("picker");
    byId("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", async () => {
      await attachments.add(picker.files);
      picker.value = "";
    });
    this.area.addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      attachments.add(event.clipboardData.files);
    });
    const isFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (!isFiles(event)) return;
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dropping"));
    addEventListener("drop", (event) => {
      if (!isFiles(event)) return;
      event.preventDefault();
      document.body.classList.remove("dropping");
      attachments.add(event.dataTransfer.files);
    });
  }

  onKey(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && (!isTouch.matches || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!this.chat.isRunning) this.send();
    } else if (event.key === "ArrowUp" && !this.area.value) this.editLast(event);
  }

  editLast(event) {
    const last = pathOf(this.chat.conversation).findLast((message) => message.role === "user");
    if (!last || this.chat.isRunning) return;
    event.preventDefault();
    this.chat.emit("edit", last.id);
  }

  send() {
    const content = this.area.value;
    if (!content.trim() && this.attachments.isEmpty) return;
    this.area.value = "";
    this.grow();
    this.chat.send({ content, ...this.attachments.take() });
  }

  write(text) {
    this.area.value = text;
    this.grow();
    this.area.focus();
  }

  grow() {
    this.area.style.height = "auto";
    this.area.style.height = `${this.area.scrollHeight + 2}px`;
    this.update();
    clearTimeout(this.counting);
    this.counting = setTimeout(() => this.count(), COUNT_MS);
  }

  update() {
    const { isRunning } = this.chat;
    const button = byId("send");
    const label = isRunning ? "Stop" : "Send";
    button.disabled = !isRunning && !this.area.value.trim() && this.attachments.isEmpty;
    button.setAttribute("aria-label", label);
    button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
    button.classList.toggle("stop", isRunning);
    byId("send-symbol").setAttribute("href", isRunning ? "#i-stop" : "#i-send");
  }

  /** Tokens of what is being written, and of the conversation so far. */
  async count() {
    this.counter?.abort();
    const text = this.area.value;
    this.counter = new AbortController();
    let draft = 0;
    if (text.trim()) {
      try {
        draft = await countTokens(text, this.counter.signal);
      } catch {
        return; // whoever sends will be told what is wrong
      }
    }
    this.tellCount(draft);
  }

  tellCount(draft = 0) {
    const made = this.chat.conversation && pathOf(this.chat.conversation).findLast((message) => message.made?.prompt)?.made;
    const used = (made ? made.prompt + made.tokens : 0) + draft;
    const most = this.info?.max_total_tokens;
    byId("count").textContent = used ? `${draft ? `${draft} new, ` : ""}${used}${most ? ` of ${most}` : ""} tokens` : "";
    byId("count").classList.toggle("warn", Boolean(most) && used > most * 0.9);
  }
}
