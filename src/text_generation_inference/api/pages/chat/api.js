// Talking to a server: what it is, how it is, and answers as they come. Knows nothing of the page.

/** A failure in words for people. `kind`: offline, key, overloaded, refused, failed, cut, stopped. */
export class ApiError extends Error {
  constructor(kind, message, status = 0, retryAfter = 0) {
    super(message);
    Object.assign(this, { kind, status, retryAfter });
  }
}

const KEY = "tgi.key:";
export const HERE = ""; // this server; others are known by their origin

/** Keys stay in this tab, one for each server, and go to that server alone. */
export const keys = {
  get: (server) => sessionStorage.getItem(KEY + server) ?? "",
  set: (server, key) => (key ? sessionStorage.setItem(KEY + server, key) : sessionStorage.removeItem(KEY + server)),
};

/** Addresses are relative, so that a page behind a proxy's path finds its server. */
const address = (server, path) => (server ? `${server}/${path}` : new URL(path, document.baseURI).href);

async function ask(server, path, options = {}) {
  const key = keys.get(server);
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(address(server, path), { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    throw broken(error, server, options.signal);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

function broken(error, server, signal) {
  if (signal?.aborted) return new ApiError("stopped", "Stopped.");
  const where = server || "The server";
  return new ApiError("offline", `${where} cannot be reached. It may have been stopped, or the network is down.`);
}

async function refusal(response) {
  const { status } = response;
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  const told = wordsOf(await response.text().catch(() => ""));
  if (status === 401 || status === 403) return new ApiError("key", told || "The server asks for an API key.", status);
  if (status === 429) return new ApiError("overloaded", `The server has too much to do: ${told || "too many requests"}. Try again in a moment.`, status, retryAfter || 1);
  if (status === 503) return new ApiError("overloaded", `The server cannot answer now: ${told || "its engine is not there"}.`, status, retryAfter || 2);
  if (status === 413) return new ApiError("refused", `This is more than the server takes at once: ${told}`, status);
  const kind = status < 500 ? "refused" : "failed";
  return new ApiError(kind, told || `The server answered with status ${status}.`, status);
}

/** The text of an error in OpenAI's form, in TGI's form, or plain. */
function wordsOf(body) {
  try {
    const { error } = JSON.parse(body);
    return typeof error === "string" ? error : String(error.message ?? "");
  } catch {
    return body.slice(0, 2000).trim();
  }
}

export const getInfo = async (server, signal) => (await ask(server, "info", { signal })).json();

let apiDocument = null;

/** The API document of this server, asked for once. */
export function getDocument() {
  apiDocument ??= ask(HERE, "api-doc/openapi.json").then((response) => response.json());
  apiDocument.catch(() => (apiDocument = null));
  return apiDocument;
}

/** How many tokens a text has. */
export async function countTokens(text, signal) {
  const response = await ask(HERE, "tokenize", { method: "POST", body: JSON.stringify({ inputs: text }), signal });
  return (await response.json()).length;
}

/** Whether a server takes requests: "ready", "starting" or "offline". */
export async function health(server) {
  try {
    await ask(server, "health", { signal: AbortSignal.timeout(5000) });
    return "ready";
  } catch (error) {
    return error.status ? "starting" : "offline";
  }
}

/** The chunks of a streamed chat answer. Ending the loop closes the connection, and with it the generation. */
export async function* streamChat(server, body, signal) {
  const response = await ask(server, "v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) break;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (!data) continue; // a comment that keeps the connection alive
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError("failed", chunk.error.message ?? String(chunk.error), chunk.error.http_status_code ?? 0);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ApiError) throw error;
    if (signal.aborted) throw new ApiError("stopped", "Stopped.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError("cut", "The connection ended before the answer did.");
}
