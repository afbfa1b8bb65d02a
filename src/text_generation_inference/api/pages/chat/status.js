// What is served, and whether it is there. Looks again only while something is wrong and the page is seen.

import { byId, el } from "../common/dom.js";
import { getInfo, HERE, health } from "./api.js";

const AGAIN_MS = 3000;
const WORDS = { ready: "ready", starting: "not ready", offline: "no connection" };

export class Status {
  constructor(onInfo) {
    Object.assign(this, { onInfo, info: null, state: "", timer: 0 });
    document.addEventListener("visibilitychange", () => document.hidden || this.state === "ready" || this.look());
    addEventListener("online", () => this.look());
    addEventListener("offline", () => this.set("offline"));
  }

  async look() {
    clearTimeout(this.timer);
    const state = await health(HERE);
    if (state !== "offline" && !this.info) await this.read();
    this.set(state);
  }

  async read() {
    try {
      this.info = await getInfo(HERE);
      this.onInfo(this.info);
    } catch {
      // the state says what is wrong
    }
  }

  set(state) {
    if (state !== this.state) {
      byId("dot").className = `dot ${state}`;
      byId("state").textContent = WORDS[state];
      byId("model").textContent = this.info?.model_id ?? "";
    }
    this.state = state;
    clearTimeout(this.timer);
    if (state !== "ready" && !document.hidden) this.timer = setTimeout(() => this.look(), AGAIN_MS);
  }
}

/** What a person wants to know of the server before the first message. */
export function facts(info) {
  const told = [
    [`${info.max_total_tokens.toLocaleString()} tokens`, "of conversation"],
    [info.pictures ? "sees pictures" : "text", info.pictures ? `up to ${info.pictures.max_images_per_request}` : "only"],
    [String(info.max_concurrent_requests), "requests at once"],
  ];
  if (info.quantization) told.push([info.quantization, ""]);
  return told.map(([value, words]) => el("li", {}, el("strong", { text: value }), ` ${words}`));
}
