// A conversation as the body of a request.

import { valuesOf } from "./settings_table.js";

/** `continues`: the last message is an answer to go on with. */
export function buildRequest(system, path, settings, seed, continues = false) {
  // An answer that failed before its first token is no part of what was said.
  const messages = path.filter((message) => message.role !== "assistant" || message.content || message.calls?.length).map(asMessage);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const values = valuesOf(settings);
  const body = { model: "tgi", messages, ...values, seed, stream: true, stream_options: { include_usage: true } };
  if (!body.logprobs) delete body.top_logprobs;
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

function asMessage(message) {
  switch (message.role) {
    case "tool":
      return { role: "tool", tool_call_id: message.call_id, name: message.name, content: message.content };
    case "assistant": {
      const answer = { role: "assistant", content: message.content };
      if (message.reasoning) answer.reasoning_content = message.reasoning;
      if (message.calls?.length) {
        answer.tool_calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments || "{}" } }));
      }
      return answer;
    }
    default:
      return { role: "user", content: userContent(message) };
  }
}

function userContent({ content, files = [], pictures = [] }) {
  const text = [...files.map(fileText), content].filter(Boolean).join("\n\n");
  if (!pictures.length) return text;
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

/** A file as text, fenced with more backticks than it holds in a row. */
function fileText({ name, text }) {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), (run) => run[0].length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
