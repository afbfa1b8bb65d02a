// Every setting of a request that the page offers, by the server's own names. What each means and which values it takes is
// read from the server's API document, so that it is said in one place.
//
// kind: number, integer, text, lines (one entry per line), ids, json, check, or a list of choices.

export const GROUPS = [
  {
    title: "Randomness",
    fields: [
      { name: "temperature", kind: "number", step: 0.05, slider: true, usual: 1 },
      { name: "top_p", kind: "number", step: 0.01, slider: true, usual: 1 },
      { name: "top_k", kind: "integer" },
      { name: "min_p", kind: "number", step: 0.01, slider: true, usual: 0 },
      { name: "typical_p", kind: "number", step: 0.01, slider: true, usual: 1 },
      { name: "top_n_sigma", kind: "number", step: 0.1 },
      { name: "seed", kind: "integer", hint: "Empty: a new one for each answer, which is shown below it." },
    ],
  },
  {
    title: "Length and end",
    fields: [
      { name: "max_tokens", kind: "integer" },
      { name: "min_tokens", kind: "integer" },
      { name: "stop", kind: "lines", hint: "One text per line." },
      { name: "stop_token_ids", kind: "ids", hint: "Numbers, separated by commas." },
      { name: "ignore_eos", kind: "check" },
      { name: "include_stop_str_in_output", kind: "check" },
      { name: "truncate", kind: "integer" },
    ],
  },
  {
    title: "Repetition",
    fields: [
      { name: "repetition_penalty", kind: "number", step: 0.01 },
      { name: "frequency_penalty", kind: "number", step: 0.1, slider: true, usual: 0 },
      { name: "presence_penalty", kind: "number", step: 0.1, slider: true, usual: 0 },
      { name: "logit_bias", kind: "json", hint: 'As {"token id": bias}.' },
    ],
  },
  {
    title: "Tokens",
    fields: [
      { name: "logprobs", kind: "check", hint: "Colours each token by its probability." },
      { name: "top_logprobs", kind: "integer", hint: "Shown when a token is chosen; needs logprobs." },
      { name: "skip_special_tokens", kind: ["true", "false"] },
      { name: "watermark", kind: "check" },
    ],
  },
  {
    title: "Thinking and form",
    fields: [
      { name: "reasoning_effort", kind: ["none", "minimal", "low", "medium", "high"] },
      { name: "response_format", kind: "json", hint: 'Such as {"type": "json_object"}, or a json_schema.' },
      { name: "guided_regex", kind: "text" },
      { name: "chat_template_kwargs", kind: "json" },
      { name: "cache_salt", kind: "text" },
    ],
  },
  {
    title: "Tools",
    fields: [
      { name: "tools", kind: "json", rows: 6, hint: 'A list of {"type": "function", "function": {"name", "description", "parameters"}}.' },
      { name: "tool_choice", kind: "text", hint: "auto, none, required, or the name of a function." },
      { name: "parallel_tool_calls", kind: ["true", "false"] },
    ],
  },
];

export const FIELDS = GROUPS.flatMap((group) => group.fields);

/** What is sent of a setting as it was typed; undefined: nothing. Throws what is wrong with it, in words. */
export function valueOf(field, given) {
  if (given === undefined || given === null || given === "" || given === false) return undefined;
  const { name, kind } = field;
  if (name === "tool_choice" && !["auto", "none", "required"].includes(given)) return { type: "function", function: { name: given } };
  if (kind === "number" || kind === "integer") {
    const value = Number(given);
    if (!Number.isFinite(value) || (kind === "integer" && !Number.isSafeInteger(value))) throw new Error(`${name} is not ${kind === "integer" ? "a whole number" : "a number"}.`);
    return value;
  }
  if (kind === "check") return true;
  if (kind === "lines") return String(given).split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (kind === "ids") return String(given).split(/[\s,]+/).filter(Boolean).map(Number);
  if (kind === "json") {
    try {
      return JSON.parse(given);
    } catch (error) {
      throw new Error(`${name} is not JSON: ${error.message}`);
    }
  }
  if (Array.isArray(kind) && kind[0] === "true") return given === "true";
  return given;
}

/** All settings of a request. */
export function valuesOf(settings) {
  const values = {};
  for (const field of FIELDS) {
    const value = valueOf(field, settings[field.name]);
    if (value !== undefined) values[field.name] = value;
  }
  return values;
}
