// What the page does: conversations are opened, messages sent, answers received, stopped, retried, continued.

import { HERE } from "./api.js";
import { receive } from "./answering.js";
import { addMessage, choose, find, newConversation, newId, pathOf, versions } from "./conversation.js";
import { buildRequest, newSeed } from "./request.js";
import { conversations, preferences } from "./store.js";

const DRAW_MS = 50; // between two drawings of a growing answer
const SAVE_MS = 2000;

export class Chat extends EventTarget {
  constructor() {
    super();
    this.conversation = null;
    this.running = new Map(); // id of an answer -> what stops it
    this.lanes = preferences.get("lanes", [{}]); // {server, temperature, seed} of each answer to a message
  }

  emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  // -- conversations -------------------------------------------------------------------------------------------------

  start() {
    const system = preferences.get("system", "");
    this.open(newConversation(system, preferences.get("settings", {})));
  }

  open(conversation) {
    if (this.conversation?.id !== conversation.id) this.stop();
    this.conversation = conversation;
    this.emit("open");
  }

  async save(conversation = this.conversation) {
    if (!conversation.messages.length) return; // not begun yet
    conversation.updated = Date.now();
    try {
      await conversations.put(structuredClone(conversation));
    } catch (error) {
      this.emit("problem", `This browser could not keep the conversation: ${error?.message ?? "it is full"}.`);
    }
    this.emit("saved");
  }

  setSystem(text) {
    this.conversation.system = text;
    preferences.set("system", text);
    this.save();
  }

  setSetting(name, value) {
    if (value === "" || value === false) delete this.conversation.settings[name];
    else this.conversation.settings[name] = value;
    preferences.set("settings", this.conversation.settings);
    this.save();
  }

  setLanes(lanes) {
    this.lanes = lanes.length ? lanes : [{}];
    preferences.set("lanes", this.lanes);
    this.emit("lanes");
  }

  // -- messages ------------------------------------------------------------------------------------------------------

  get isRunning() {
    return this.running.size > 0;
  }

  send(given) {
    const last = pathOf(this.conversation).at(-1);
    const message = addMessage(this.conversation, { role: "user", parent: last?.id ?? null, ...given });
    return this.answer(message.id);
  }

  /** As many answers to a message as there are lanes. */
  async answer(parent) {
    const group = this.lanes.length > 1 ? newId() : undefined;
    const { conversation } = this;
    const begun = this.lanes.map((lane) => {
      const settings = settingsOf(conversation, lane);
      const seed = lane.seed || settings.seed;
      const made = { ...lane, seed: seed === undefined ? newSeed() : Number(seed), ...(group ? { label: labelOf(lane, settings) } : {}) };
      return { message: addMessage(conversation, { role: "assistant", parent, group, made }), settings };
    });
    choose(conversation, begun[0].message);
    this.emit("sent");
    await Promise.all(begun.map(({ message, settings }) => this.run(conversation, message, settings)));
  }

  async run(conversation, message, settings, continues = false) {
    const path = pathOf(conversation, continues ? message.id : message.parent);
    const stopper = new AbortController();
    this.running.set(message.id, stopper);
    this.emit("running");
    let body;
    try {
      body = buildRequest(conversation.system, path, settings, message.made.seed, continues);
    } catch (error) {
      message.error = { kind: "refused", text: error.message, status: 0 };
    }
    let drawn = 0;
    let saved = performance.now();
    const changed = () => {
      const now = performance.now();
      if (now - saved > SAVE_MS) {
        saved = now;
        this.save(conversation);
      }
      if (now - drawn < DRAW_MS) return;
      drawn = now;
      this.emit("changed");
    };
    if (body) await receive(message, message.made.server ?? HERE, body, stopper.signal, changed);
    this.running.delete(message.id);
    await this.save(conversation);
    this.emit("changed");
    this.emit("running");
    this.emit("ended", message);
  }

  stop() {
    for (const stopper of this.running.values()) stopper.abort();
  }

  // -- what the buttons of a message do ------------------------------------------------------------------------------

  redraw() {
    this.emit("changed");
  }

  /** Another answer beside the one there is, or, for one that failed, in its place. */
  retry(message, inPlace = false) {
    if (inPlace ? this.running.has(message.id) : this.isRunning) return undefined; // others beside it may go on
    if (!inPlace) return this.answer(message.parent);
    for (const name of ["reasoning", "calls", "tokens", "error", "finish"]) delete message[name];
    message.content = message.kept ?? "";
    return this.run(this.conversation, message, settingsOf(this.conversation, message.made), Boolean(message.kept));
  }

  /** The same answer, further. */
  goOn(message) {
    if (this.isRunning) return undefined;
    return this.run(this.conversation, message, settingsOf(this.conversation, message.made), true);
  }

  /** A branch that has another token in one place and goes on from there. */
  fork(message, index, text) {
    if (this.isRunning) return undefined;
    const before = message.tokens.slice(0, index);
    const content = before.map((token) => token.text).join("") + text;
    const [, logprob] = message.tokens[index].top.find(([other]) => other === text);
    const tokens = [...before, { ...message.tokens[index], text, logprob }];
    const made = { seed: message.made.seed };
    for (const name of ["server", "temperature"]) if (message.made[name] !== undefined) made[name] = message.made[name];
    const branch = addMessage(this.conversation, { role: "assistant", parent: message.parent, content, kept: content, tokens, made });
    this.emit("sent");
    return this.run(this.conversation, branch, settingsOf(this.conversation, made), true);
  }

  edit(message, text) {
    const { role, parent, files, pictures } = message;
    if (text === message.content) return undefined;
    const branch = { role, parent, content: text, ...(files ? { files } : {}), ...(pictures ? { pictures } : {}) };
    if (role === "assistant") {
      addMessage(this.conversation, { ...branch, made: { label: "edited", seed: message.made?.seed ?? newSeed() }, finish: "stopped" });
      this.emit("sent");
      return this.save();
    }
    if (this.isRunning) this.stop();
    return this.answer(addMessage(this.conversation, branch).id);
  }

  giveResults(message, results) {
    let parent = message.id;
    message.calls.forEach((call, index) => {
      parent = addMessage(this.conversation, { role: "tool", parent, call_id: call.id, name: call.name, content: results[index] }).id;
    });
    return this.answer(parent);
  }

  showVersion(message, step) {
    const all = versions(this.conversation, message);
    const at = all.findIndex((other) => (other.group ?? other.id) === (message.group ?? message.id));
    const other = all[at + step];
    if (!other) return;
    choose(this.conversation, other);
    this.save();
    this.emit("changed");
    this.emit("focus", other.id);
  }

  pick(message) {
    choose(this.conversation, find(this.conversation, message.id));
    this.save();
    this.emit("changed");
  }

  useSeed(seed) {
    this.setSetting("seed", seed);
    this.emit("settings");
    this.emit("told", `Seed ${seed} is set.`);
  }

  askKey(message) {
    this.emit("key", message);
  }
}

/** Those of the conversation, with what is different for one of several answers. */
function settingsOf(conversation, { temperature }) {
  return temperature === undefined || temperature === "" ? conversation.settings : { ...conversation.settings, temperature };
}

function labelOf(lane, settings) {
  const parts = [lane.server ? new URL(lane.server).host : "", settings.temperature === undefined ? "" : `temperature ${settings.temperature}`];
  return parts.filter(Boolean).join(", ") || "as set";
}
