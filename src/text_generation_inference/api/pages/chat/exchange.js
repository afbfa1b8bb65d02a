// Conversations as files: written out, and read back with nothing taken on trust.

import { newId } from "./conversation.js";
import { FIELDS } from "./settings_table.js";

const FORM = "tgi-chat";
const VERSION = 1;
const PICTURE = /^data:image\/(png|jpeg|gif|webp|bmp|tiff);base64,[A-Za-z0-9+/=]+$/;

export function exportText(conversations) {
  return JSON.stringify({ form: FORM, version: VERSION, exported: new Date().toISOString(), conversations }, null, 1);
}

/** The conversations of a file, with ids of their own. Throws what is wrong with it, in words. */
export function importText(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (given?.form !== FORM || !Array.isArray(given.conversations)) throw new Error("The file does not hold conversations of this page.");
  if (given.version > VERSION) throw new Error("The file was written by a newer version of this page.");
  return given.conversations.map(cleanConversation);
}

const string = (value) => (typeof value === "string" ? value : "");
const number = (value, otherwise) => (Number.isFinite(value) ? value : otherwise);
const list = (value) => (Array.isArray(value) ? value.filter((entry) => entry && typeof entry === "object") : []);

function cleanConversation(given) {
  const now = Date.now();
  const ids = new Map([[null, null]]);
  const messages = [];
  for (const message of list(given?.messages)) {
    const parent = message.parent ?? null;
    if (!ids.has(parent) || !["user", "assistant", "tool"].includes(message.role)) continue;
    const clean = cleanMessage(message, ids.get(parent));
    ids.set(message.id, clean.id);
    messages.push(clean);
  }
  const chosen = {};
  for (const [parent, child] of Object.entries(given?.chosen ?? {})) {
    if (ids.has(child) && (parent === "start" || ids.has(parent))) chosen[parent === "start" ? parent : ids.get(parent)] = ids.get(child);
  }
  const settings = {};
  for (const { name } of FIELDS) {
    const value = given?.settings?.[name];
    if (["string", "number", "boolean"].includes(typeof value)) settings[name] = value;
  }
  return { id: newId(), title: string(given?.title).slice(0, 200), created: number(given?.created, now), updated: number(given?.updated, now), system: string(given?.system), settings, messages, chosen };
}

function cleanMessage(given, parent) {
  const message = { id: newId(), parent, role: given.role, created: number(given.created, Date.now()), content: string(given.content) };
  for (const name of ["reasoning", "call_id", "group", "finish", "name"]) if (string(given[name])) message[name] = given[name];
  if (list(given.files).length) message.files = list(given.files).map((file) => ({ name: string(file.name), text: string(file.text) }));
  if (Array.isArray(given.pictures)) message.pictures = given.pictures.filter((picture) => PICTURE.test(string(picture)));
  if (list(given.calls).length) message.calls = list(given.calls).map((call) => ({ id: string(call.id), name: string(call.name), arguments: string(call.arguments) }));
  if (list(given.tokens).length) {
    message.tokens = list(given.tokens).map((token) => ({
      text: string(token.text),
      logprob: number(token.logprob, 0),
      top: Array.isArray(token.top) ? token.top.filter(Array.isArray).map(([text, logprob]) => [string(text), number(logprob, 0)]) : [],
    }));
  }
  if (given.made && typeof given.made === "object") {
    message.made = {};
    for (const [key, value] of Object.entries(given.made).slice(0, 20)) if (["string", "number"].includes(typeof value)) message.made[key] = value;
  }
  return message;
}
