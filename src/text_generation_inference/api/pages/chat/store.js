// Conversations in this browser's IndexedDB, and small preferences in localStorage. Where a browser keeps nothing (private
// windows of some), all of it works until the page is closed.

const NAME = "tgi-chat";
let opened = null;
const memory = new Map();

function open() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

async function run(mode, act) {
  const database = await open();
  if (!database) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("conversations", mode);
    const request = act(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? request?.error);
  });
}

export const conversations = {
  /** All, the latest first. */
  async all() {
    const found = (await run("readonly", (store) => store.getAll())) ?? [...memory.values()];
    return found.sort((a, b) => b.updated - a.updated);
  },
  async put(conversation) {
    memory.set(conversation.id, conversation);
    await run("readwrite", (store) => store.put(conversation));
  },
  async remove(id) {
    memory.delete(id);
    await run("readwrite", (store) => store.delete(id));
  },
  async clear() {
    memory.clear();
    await run("readwrite", (store) => store.clear());
  },
};

const PREFIX = "tgi.chat.";
const kept = new Map();

export const preferences = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(PREFIX + name)) ?? kept.get(name) ?? otherwise;
    } catch {
      return kept.get(name) ?? otherwise;
    }
  },
  set(name, value) {
    kept.set(name, value);
    try {
      localStorage.setItem(PREFIX + name, JSON.stringify(value));
    } catch {
      // full or forbidden: it holds until the page is closed
    }
  },
};
