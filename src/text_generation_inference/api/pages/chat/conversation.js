// A conversation: messages in a tree. Editing and retrying add branches, nothing is lost; what is shown is one path.
//
// Messages are kept in the order they were made, each with its `parent`. Answers made side by side share a `group`.

export const newId = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function newConversation(system = "", settings = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, settings: { ...settings }, messages: [], chosen: {} };
}

const place = (parent) => parent ?? "start";

export const find = (conversation, id) => conversation.messages.find((message) => message.id === id);

export const childrenOf = (conversation, parent) => conversation.messages.filter((message) => message.parent === parent);

/** The messages from the first to the last that is shown. */
export function pathOf(conversation, last = null) {
  if (last !== null) {
    const path = [];
    for (let message = find(conversation, last); message; message = find(conversation, message.parent)) path.unshift(message);
    return path;
  }
  const byParent = Map.groupBy ? Map.groupBy(conversation.messages, (message) => message.parent) : grouped(conversation.messages);
  const path = [];
  for (let parent = null; ; parent = path.at(-1).id) {
    const children = byParent.get(parent);
    if (!children) return path;
    path.push(children.find((child) => child.id === conversation.chosen[place(parent)]) ?? children.at(-1));
  }
}

function grouped(messages) {
  const groups = new Map();
  for (const message of messages) groups.set(message.parent, [...(groups.get(message.parent) ?? []), message]);
  return groups;
}

export function addMessage(conversation, message) {
  const added = { id: newId(), created: Date.now(), content: "", ...message };
  conversation.messages.push(added);
  choose(conversation, added);
  if (!conversation.title && added.role === "user") conversation.title = titleOf(added);
  conversation.updated = Date.now();
  return added;
}

export function choose(conversation, message) {
  conversation.chosen[place(message.parent)] = message.id;
}

function titleOf(message) {
  const line = message.content.trim().split("\n")[0] || message.files?.[0]?.name || "Picture";
  return line.length > 60 ? `${line.slice(0, 57)}...` : line;
}

/** Answers to the same message that were made together, this one among them. */
export function companions(conversation, message) {
  if (!message.group) return [message];
  return conversation.messages.filter((other) => other.parent === message.parent && other.group === message.group);
}

/** One message of each version that stands in the place of this one; those made together count as one. */
export function versions(conversation, message) {
  const seen = new Map();
  for (const other of childrenOf(conversation, message.parent)) {
    const key = other.group ?? other.id;
    if (!seen.has(key) || other.id === conversation.chosen[place(message.parent)]) seen.set(key, other);
  }
  return [...seen.values()];
}

/** Whether all words are somewhere in the conversation. */
export function matches(conversation, query) {
  const text = [conversation.title, conversation.system, ...conversation.messages.map((message) => message.content)].join("\n").toLowerCase();
  return query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** The shown path as a document for people. */
export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system) parts.push(`**System:** ${conversation.system}`);
  for (const message of pathOf(conversation)) {
    const name = { user: "You", assistant: message.made?.model ?? "Answer", tool: "Tool" }[message.role];
    const calls = (message.calls ?? []).map((call) => `\`${call.name}(${call.arguments})\``);
    const files = (message.files ?? []).map((file) => `File ${file.name}:\n\n~~~~\n${file.text}\n~~~~`);
    parts.push([`## ${name}`, ...files, message.content, ...calls].filter(Boolean).join("\n\n"));
  }
  return `${parts.join("\n\n")}\n`;
}
