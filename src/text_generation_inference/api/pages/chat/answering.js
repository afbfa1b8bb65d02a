// One answer on its way: the chunks of a stream put into a message, with how long they took.

import { ApiError, streamChat } from "./api.js";

/** Fills `message` until the answer ends; `changed` is called after each part. Never throws: a failure is `message.error`. */
export async function receive(message, server, body, signal, changed) {
  const begun = performance.now();
  const made = (message.made ??= {});
  const decoder = new TextDecoder();
  let first = 0;
  let last = 0;
  let pieces = 0;
  delete message.error;
  delete message.finish;
  try {
    for await (const chunk of streamChat(server, body, signal)) {
      const choice = chunk.choices?.[0];
      if (chunk.model) made.model = chunk.model;
      if (choice) {
        const grew = takeDelta(message, choice, decoder);
        if (grew) {
          last = performance.now();
          pieces += 1;
          if (pieces === 1) first = last;
          made.first_ms = Math.round(first - begun);
          made.tokens = pieces;
        }
        if (choice.finish_reason) message.finish = choice.finish_reason;
      }
      if (chunk.usage) takeUsage(made, chunk.usage);
      if (last > first) made.per_second = ((made.tokens - 1) * 1000) / (last - first);
      changed();
    }
    made.total_ms = Math.round(performance.now() - begun);
  } catch (error) {
    const failure = error instanceof ApiError ? error : new ApiError("failed", error.message);
    if (failure.kind === "stopped") message.finish = "stopped";
    else message.error = { kind: failure.kind, text: failure.message, status: failure.status, retryAfter: failure.retryAfter };
  }
  changed();
}

function takeDelta(message, choice, decoder) {
  const { delta = {} } = choice;
  const thoughts = delta.reasoning_content ?? delta.reasoning ?? "";
  if (thoughts) message.reasoning = (message.reasoning ?? "") + thoughts;
  if (delta.content) message.content += delta.content;
  for (const part of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name = part.function.name;
    call.arguments += part.function?.arguments ?? "";
  }
  for (const token of choice.logprobs?.content ?? []) {
    message.tokens ??= [];
    message.tokens.push({
      text: token.bytes ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token,
      logprob: token.logprob,
      top: (token.top_logprobs ?? []).map((top) => [top.token, top.logprob]),
    });
  }
  return Boolean(thoughts || delta.content || delta.tool_calls?.length);
}

function takeUsage(made, usage) {
  made.tokens = usage.completion_tokens;
  made.prompt = usage.prompt_tokens;
  if (usage.prompt_tokens_details) made.cached = usage.prompt_tokens_details.cached_tokens;
  if (usage.completion_tokens_details) made.thoughts = usage.completion_tokens_details.reasoning_tokens;
}
