// ai, with its provider for servers like OpenAI's: text, a stream, a tool, and typed answers, with a tool beside them too.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, question] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "tgi",
  baseURL: `${url}/v1`,
  apiKey: "unused",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const settings = { model: provider("tgi"), temperature: 0, maxRetries: 0 };
const whole = await generateText({ ...settings, prompt: question, maxOutputTokens: 12 });
const stream = streamText({ ...settings, prompt: question, maxOutputTokens: 12 });
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;

const cities = [];
const get_weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(16) }),
  execute: async ({ city }) => (cities.push(city), `Sunny in ${city}`),
});
const called = await generateText({
  ...settings,
  prompt: "What is the weather in Paris?",
  tools: { get_weather },
  toolChoice: "required",
  maxOutputTokens: 60,
});
const calling = streamText({
  ...settings,
  prompt: "What is the weather in Paris?",
  tools: { get_weather },
  toolChoice: "required",
  maxOutputTokens: 60,
});
await calling.consumeStream();

const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });
const asked = { ...settings, prompt: "Anna is 31 years old. Describe her.", maxOutputTokens: 60 };
const typed = await generateText({ ...asked, output: Output.object({ schema: Person }) });
const both = await generateText({ ...asked, tools: { get_weather }, output: Output.object({ schema: Person }) });
const answered = await generateText({
  ...asked,
  tools: { get_weather },
  toolChoice: "none",
  output: Output.object({ schema: Person }),
});
console.log(
  JSON.stringify({
    texts: [whole.text, streamed],
    tokens: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    results: [called.toolResults[0].output, (await calling.toolResults)[0].output],
    cities,
    person: typed.output,
    both: both.toolCalls.length ? both.toolCalls[0] : both.output,
    answered: answered.output,
  }),
);
