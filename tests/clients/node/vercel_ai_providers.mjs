// ai, with its providers for OpenAI (the Responses API) and Anthropic: text, streams, a tool with a second step, typed answers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, question] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false;
const models = {
  openai: createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" })("tgi"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "unused" })("tgi"),
};
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });
const said = {};
for (const [name, model] of Object.entries(models)) {
  const settings = { model, temperature: 0, maxRetries: 0 };
  const whole = await generateText({ ...settings, prompt: question, maxOutputTokens: 12 });
  const stream = streamText({ ...settings, prompt: question, maxOutputTokens: 12 });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  const get_weather = tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.string().max(16) }),
    execute: async ({ city }) => `Sunny in ${city}`,
  });
  const asked = { ...settings, prompt: "What is the weather in Paris?", tools: { get_weather }, maxOutputTokens: 60 };
  const called = await generateText({
    ...asked,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  });
  const calling = streamText({ ...asked, toolChoice: "required" });
  await calling.consumeStream();
  const typed = await generateText({
    ...settings,
    prompt: "Anna is 31 years old. Describe her.",
    maxOutputTokens: 60,
    output: Output.object({ schema: Person }),
  });
  said[name] = {
    texts: [whole.text, streamed],
    ends: [whole.finishReason, await stream.finishReason],
    tokens: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    steps: called.steps.length,
    results: [called.steps[0].toolResults[0].output, (await calling.toolResults)[0].output],
    answered: called.text.length > 0,
    person: typed.output,
  };
}
console.log(JSON.stringify(said));
