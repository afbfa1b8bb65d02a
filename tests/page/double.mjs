// A server in front of the real one: everything is the real server's, but for messages that begin with "double:NAME", which
// get an answer that no model can be made to give on demand: thoughts, hostile text, failures in the middle.

import { createServer, request } from "node:http";

export class Double {
  constructor(upstream) {
    this.upstream = new URL(upstream);
    this.bodies = []; // of chat requests, in order
    this.answers = {}; // NAME -> async (response) => ...
    this.server = createServer((from, to) => this.answer(from, to));
  }

  async start() {
    await new Promise((resolve) => this.server.listen(0, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${this.server.address().port}`;
    return this;
  }

  stop() {
    this.server.closeAllConnections();
    this.server.close();
  }

  async answer(from, to) {
    const pieces = [];
    for await (const piece of from) pieces.push(piece);
    const body = Buffer.concat(pieces);
    if (from.method === "POST" && from.url === "/v1/chat/completions") {
      const asked = JSON.parse(body);
      this.bodies.push(asked);
      const content = asked.messages.findLast((message) => message.role === "user").content;
      const name = /^double:(\S+)/.exec(typeof content === "string" ? content : "")?.[1];
      if (name) return this.answers[name](to, from);
    }
    const { host, ...headers } = from.headers;
    const forward = request(new URL(from.url, this.upstream), { method: from.method, headers: { ...headers, host: this.upstream.host } }, (answer) => {
      to.writeHead(answer.statusCode, answer.headers);
      answer.pipe(to);
    });
    forward.on("error", () => to.destroy());
    to.on("close", () => forward.destroy());
    forward.end(body);
    return undefined;
  }
}

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export function begin(to) {
  to.writeHead(200, { "content-type": "text/event-stream" });
}

export function event(to, delta, more = {}) {
  const choice = { index: 0, delta: { role: "assistant", ...delta }, logprobs: null, finish_reason: null, ...more };
  to.write(`data: ${JSON.stringify({ object: "chat.completion.chunk", model: "double", choices: [choice] })}\n\n`);
}

export function end(to, tokens = 1) {
  event(to, { content: "" }, { finish_reason: "stop" });
  const usage = { prompt_tokens: 7, completion_tokens: tokens, total_tokens: tokens + 7, prompt_tokens_details: { cached_tokens: 4 } };
  to.end(`data: ${JSON.stringify({ object: "chat.completion.chunk", choices: [], usage })}\n\ndata: [DONE]\n\n`);
}

/** A text in pieces of so many characters. */
export const speaking = (text, size = 7, ms = 0) => async (to) => {
  begin(to);
  for (let at = 0; at < text.length; at += size) {
    event(to, { content: text.slice(at, at + size) });
    if (ms) await wait(ms);
    else if (at % (size * 40) === 0) await wait(0);
  }
  end(to, Math.ceil(text.length / size));
};

export const refusing = (status, body, headers = {}) => (to) => {
  to.writeHead(status, { "content-type": "application/json", ...headers });
  to.end(JSON.stringify(body));
};
